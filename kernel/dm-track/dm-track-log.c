// SPDX-License-Identifier: GPL-2.0
/*
 * The write-intent log: a record that survives a crash.
 *
 * The device is divided into regions. A region is idle, with its part of the
 * bitmap on the metadata device, or active, with an intent there. After a crash
 * all blocks of active regions count as changed; idle ones are known exactly.
 *
 *   activating   write the intent (FUA), let writes pass, mark, write data
 *   idling       stop writes from passing, wait for those between the check and
 *                the mark (RCU), write the region's bits, flush, drop the intent
 *
 * Idling does not wait for data in flight: its blocks are marked, and the marks
 * are durable before the intent goes. Data that never lands is one block too
 * many, never one too few.
 *
 * On the metadata device, in units of its logical block size:
 *
 *   byte 0, 4096   superblock, written in turns
 *   byte 8192      groups of regions, one after the other. Each has a unit of
 *                  intents, one bit a region, and then the bits of its regions
 *                  for even epochs, and for odd ones.
 *
 * A region's bits carry the number of their epoch. Bits of an older epoch mean
 * that nothing was written in this one. So starting an epoch costs one
 * superblock, not a bitmap. What lies torn under an intent is never looked at;
 * what is damaged without one makes the region changed whole, and so does a
 * damaged unit of intents for its group.
 *
 * If metadata cannot be written, data I/O does not fail. Writes to idle regions
 * wait until a superblock that says "everything changed" (full) is durable; then
 * the log is needed no longer and all pass. If that cannot be written either they
 * wait on, and it is tried again, until it can be or until the administrator
 * declares the log to be without meaning (untrack).
 */
#include "dm-track.h"

#include <linux/blkdev.h>
#include <linux/crc32.h>
#include <linux/module.h>
#include <linux/sched/mm.h>
#include <linux/vmalloc.h>
#include <linux/workqueue.h>

#define SUPER_MAGIC	0x314b434152544d44ULL	/* "DMTRACK1" */
#define SUPER_VERSION	1
#define SUPER_FULL	BIT(0)	/* every block counts as changed */
#define SUPER_LOST	BIT(1)	/* the active epoch is lost */
#define SUPER_FROZEN_LOST BIT(2)
#define SUPER_SPACING	4096
#define GROUPS_START	(2 * SUPER_SPACING)
#define BLANK_BYTES	(2 * LOG_BUFFER)	/* looked at before formatting */
#define LOG_BUFFER	SZ_64K
#define LOG_BATCH	128	/* regions that idle at once */

static unsigned int idle_ms = 5000;
module_param(idle_ms, uint, 0644);
MODULE_PARM_DESC(idle_ms, "A region idles after one to two times this without a write (default 5000)");

struct track_super {
	__le64 magic;
	__le32 crc;
	__le32 version;
	__u8 uuid[16];
	__u8 released[16];
	__le64 sequence;
	__le64 sectors;
	__le64 epoch;
	__le64 frozen;		/* number of the frozen epoch, or 0 */
	__le64 groups;		/* that are formatted */
	__le32 block_sectors;
	__le32 region_sectors;
	__le32 unit;
	__le32 flags;
};

struct track_intents {
	__le32 crc;
	__le32 group;
	__u8 bits[];
};

struct track_region {
	__le64 epoch;
	__le32 crc;
	__le32 pad;
	__u8 bits[];
};

enum log_state {
	LOG_OK,		/* regions activate and idle */
	LOG_WAITING,	/* metadata cannot be written, activating waits */
	LOG_FULL,	/* the superblock says that everything changed */
	LOG_UNTRACKED,	/* declared to be without meaning */
};

/**
 * struct track_log - write-intent log
 * @record: whose log it is
 * @lock: all below but @deferred, and all metadata I/O
 * @maps: @open, @used and @intent; the map path reads and sets @used, and reads
 *	@open, under RCU
 * @state: see above
 * @hold: callers that want no region to idle
 * @active: the epoch that the superblock calls active
 * @frozen: the one it calls frozen, or NULL
 * @sectors: size of the device, in the superblock
 * @regions: regions in @maps
 * @active_regions: bits in @maps.open
 * @groups: formatted on disk
 * @sequence: of superblocks
 * @unit: bytes, the smallest write
 * @group_regions: regions of a group
 * @region_bytes: bytes of a region's bits on disk, whole units
 * @seed: of checksums, so that older formats are not taken for this one
 * @buffer: for metadata I/O
 * @batch: regions to idle
 * @cursor: where to look for regions to idle
 * @wq: runs the work below, one at a time
 * @open_work: activates regions for @deferred
 * @idle_work: idles regions, and tries again after errors
 * @running: @idle_work may be queued
 * @deferred_lock: protects @deferred
 * @deferred: writes that wait for their regions
 */
struct track_log {
	struct track_record *record;
	struct mutex lock;
	struct track_maps maps;
	enum log_state state;
	unsigned int hold;
	struct track_epoch *active;
	struct track_epoch *frozen;
	sector_t sectors;
	u64 regions;
	u64 active_regions;
	u64 groups;
	u64 sequence;
	u32 unit;
	u32 group_regions;
	u32 region_bytes;
	u32 seed;
	void *buffer;
	u32 batch[LOG_BATCH];
	u64 cursor;
	struct workqueue_struct *wq;
	struct work_struct open_work;
	struct delayed_work idle_work;
	bool running;
	spinlock_t deferred_lock;
	struct bio_list deferred;
};

/* Metadata I/O. All of it goes through the one buffer, which is contiguous. */

static int log_io(struct track_log *log, blk_opf_t opf, u64 byte, size_t bytes)
{
	struct track_target *owner = log->record->owner;
	struct bio_vec vec;
	struct bio bio;
	int err;

	lockdep_assert_held(&log->lock);
	if (!owner)
		return -ENODEV;
	bio_init(&bio, owner->meta->bdev, &vec, 1, opf | REQ_META | REQ_SYNC);
	bio.bi_iter.bi_sector = byte >> SECTOR_SHIFT;
	__bio_add_page(&bio, virt_to_page(log->buffer), bytes,
		       offset_in_page(log->buffer));
	err = submit_bio_wait(&bio);
	bio_uninit(&bio);
	return err;
}

static u64 log_group_bytes(struct track_log *log)
{
	return log->unit + 2ULL * log->group_regions * log->region_bytes;
}

static u64 log_group_at(struct track_log *log, u64 group)
{
	return GROUPS_START + group * log_group_bytes(log);
}

static u64 log_region_at(struct track_log *log, u64 region, u64 epoch)
{
	u64 group = div_u64(region, log->group_regions);
	u64 in_group = region - group * log->group_regions;

	if (epoch & 1)
		in_group += log->group_regions;
	return log_group_at(log, group) + log->unit + in_group * log->region_bytes;
}

static u64 log_region_bits(struct track_log *log)
{
	return 1ULL << log->record->region_shift;
}

static unsigned long *log_region_words(struct track_log *log,
				       struct track_epoch *e, u64 region)
{
	return e->bits + ((region << log->record->region_shift) / BITS_PER_LONG);
}

static u32 log_region_crc(struct track_log *log, struct track_region *on_disk,
			  u64 region)
{
	u32 crc = crc32_le(log->seed, (u8 *)&region, sizeof(region));

	crc = crc32_le(crc, (u8 *)&on_disk->epoch, sizeof(on_disk->epoch));
	return crc32_le(crc, on_disk->bits, log_region_bits(log) / BITS_PER_BYTE);
}

static u32 log_intents_crc(struct track_log *log, struct track_intents *i)
{
	return crc32_le(log->seed, (u8 *)&i->group, log->unit - sizeof(i->crc));
}

static int log_write_super(struct track_log *log, u32 flags)
{
	struct track_record *r = log->record;
	struct track_super *s = log->buffer;

	if (log->active->lost)
		flags |= SUPER_LOST;
	if (log->frozen && log->frozen->lost)
		flags |= SUPER_FROZEN_LOST;
	memset(s, 0, log->unit);
	s->magic = cpu_to_le64(SUPER_MAGIC);
	s->version = cpu_to_le32(SUPER_VERSION);
	export_uuid(s->uuid, &r->uuid);
	export_uuid(s->released, &r->released);
	s->sequence = cpu_to_le64(++log->sequence);
	s->sectors = cpu_to_le64(log->sectors);
	s->epoch = cpu_to_le64(log->active->number);
	s->frozen = cpu_to_le64(log->frozen ? log->frozen->number : 0);
	s->groups = cpu_to_le64(log->groups);
	s->block_sectors = cpu_to_le32(1U << r->block_shift);
	s->region_sectors = cpu_to_le32(track_log_region_sectors(log));
	s->unit = cpu_to_le32(log->unit);
	s->flags = cpu_to_le32(flags);
	s->crc = cpu_to_le32(crc32_le(~0, log->buffer, log->unit));
	/* In turns, so that a torn one leaves the one before. */
	return log_io(log, REQ_OP_WRITE | REQ_PREFLUSH | REQ_FUA,
		      (log->sequence & 1) * SUPER_SPACING, log->unit);
}

/* Write one group's intents. */
static int log_write_intents(struct track_log *log, u64 group, blk_opf_t flush)
{
	struct track_intents *i = log->buffer;
	u64 first = group * log->group_regions;
	u64 end = min(first + log->group_regions, log->regions), region;

	memset(i, 0, log->unit);
	i->group = cpu_to_le32(group);
	for (region = find_next_bit(log->maps.intent, end, first); region < end;
	     region = find_next_bit(log->maps.intent, end, region + 1))
		i->bits[(region - first) / 8] |= 1 << (region - first) % 8;
	i->crc = cpu_to_le32(log_intents_crc(log, i));
	return log_io(log, REQ_OP_WRITE | REQ_FUA | flush,
		      log_group_at(log, group), log->unit);
}

/* Write the bits of some regions, given ascending; neighbours go together. */
static int log_write_regions(struct track_log *log, struct track_epoch *e,
			     const u32 *regions, unsigned int count)
{
	size_t bits = log_region_bits(log) / BITS_PER_BYTE;
	unsigned int i = 0, n;
	int err;

	while (i < count) {
		u64 at = log_region_at(log, regions[i], e->number);

		for (n = 0; i + n < count && (n + 1) * log->region_bytes <= LOG_BUFFER; n++) {
			u64 region = regions[i + n];
			struct track_region *on_disk = log->buffer + n * log->region_bytes;

			if (log_region_at(log, region, e->number) !=
			    at + n * log->region_bytes)
				break;
			memset(on_disk, 0, log->region_bytes);
			on_disk->epoch = cpu_to_le64(e->number);
			memcpy(on_disk->bits, log_region_words(log, e, region), bits);
			on_disk->crc = cpu_to_le32(log_region_crc(log, on_disk, region));
		}
		err = log_io(log, REQ_OP_WRITE, at, n * log->region_bytes);
		if (err)
			return err;
		i += n;
	}
	return 0;
}

/* All regions may be written from now on, and none idles. */
static void log_all_open(struct track_log *log, enum log_state state)
{
	bitmap_fill(log->maps.open, log->regions);
	WRITE_ONCE(log->active_regions, log->regions);
	log->state = state;
	queue_work(log->wq, &log->open_work);
}

static unsigned long log_tick(void)
{
	return msecs_to_jiffies(max(READ_ONCE(idle_ms), 10U));
}

static void log_again(struct track_log *log, unsigned long delay)
{
	if (log->running)
		mod_delayed_work(log->wq, &log->idle_work, delay);
}

static void log_try_full(struct track_log *log)
{
	if (log_write_super(log, SUPER_FULL)) {
		log_again(log, log_tick());
		return;
	}
	DMWARN("%s: after a crash every block will count as changed",
	       log->record->name);
	log_all_open(log, LOG_FULL);
	log_again(log, 6 * log_tick());
}

static void log_failed(struct track_log *log, int err)
{
	if (log->state != LOG_OK)
		return;
	DMERR("%s: cannot write metadata (%d); writes to idle regions wait",
	      log->record->name, err);
	log->state = LOG_WAITING;
	log_try_full(log);
}

/* A superblock for what is now, where there may be one; @err is of what it needs. */
static void log_commit(struct track_log *log, int err)
{
	if (!err && log->state == LOG_FULL)
		err = log_write_super(log, SUPER_FULL);
	else if (!err && log->state == LOG_OK)
		err = log_write_super(log, 0);
	if (err)
		log_failed(log, err);
}

/* Activating. */

/**
 * track_log_covers - may a write pass?
 * @log: the log
 * @first: first block
 * @last: last block
 *
 * The caller is in an RCU section and leaves it only after it has marked the
 * blocks. Thus log_idle_batch() finds the marks of all who were told yes.
 *
 * Return: true if all regions of the range are active.
 */
bool track_log_covers(struct track_log *log, u64 first, u64 last)
{
	first >>= log->record->region_shift;
	last >>= log->record->region_shift;
	if (likely(first == last)) {
		if (!test_bit(first, log->maps.open))
			return false;
		if (!test_bit(first, log->maps.used))
			set_bit(first, log->maps.used);
		return true;
	}
	if (find_next_zero_bit(log->maps.open, last + 1, first) <= last)
		return false;
	track_bits_set(log->maps.used, first, last);
	return true;
}

/**
 * track_log_defer - let a write wait until its regions are active
 * @log: the log
 * @bio: a mapped bio whose track_io tells its blocks
 */
void track_log_defer(struct track_log *log, struct bio *bio)
{
	spin_lock(&log->deferred_lock);
	bio_list_add(&log->deferred, bio);
	spin_unlock(&log->deferred_lock);
	queue_work(log->wq, &log->open_work);
}

/* Take down the intent for regions that are not active yet. */
static void log_intend(struct track_log *log, u64 first, u64 last)
{
	if (find_next_zero_bit(log->maps.open, last + 1, first) <= last)
		bitmap_set(log->maps.intent, first, last - first + 1);
}

/* Activate what is intended in one group. */
static int log_open_group(struct track_log *log, u64 group)
{
	u64 first = group * log->group_regions;
	u64 end = min(first + log->group_regions, log->regions), word;
	unsigned long old, added = 0;
	int err = log_write_intents(log, group, 0);

	if (err)
		return err;
	/* Durable (FUA) before any writer can see it. Groups are whole words. */
	for (word = first / BITS_PER_LONG; word < BITS_TO_LONGS(end); word++) {
		old = atomic_long_fetch_or(log->maps.intent[word],
					   (atomic_long_t *)&log->maps.open[word]);
		added += hweight_long(log->maps.intent[word] & ~old);
	}
	WRITE_ONCE(log->active_regions, log->active_regions + added);
	return 0;
}

/* Activate a range of regions, all of them intended. */
static int log_open_range(struct track_log *log, u64 first, u64 last)
{
	u64 closed = find_next_zero_bit(log->maps.open, last + 1, first);
	int err;

	while (closed <= last) {
		err = log_open_group(log, div_u64(closed, log->group_regions));
		if (err)
			return err;
		cond_resched();
		closed = find_next_zero_bit(log->maps.open, last + 1, closed + 1);
	}
	if (log->running)
		queue_delayed_work(log->wq, &log->idle_work, log_tick());
	return 0;
}

/**
 * track_log_open - activate the regions of some blocks
 * @log: the log
 * @first: first block
 * @last: last block
 *
 * Return: 0, or -EIO while metadata cannot be written.
 */
int track_log_open(struct track_log *log, u64 first, u64 last)
{
	int err;

	first >>= log->record->region_shift;
	last >>= log->record->region_shift;
	mutex_lock(&log->lock);
	if (log->state == LOG_OK) {
		log_intend(log, first, last);
		err = log_open_range(log, first, last);
		if (err)
			log_failed(log, err);
	}
	err = log->state == LOG_WAITING ? -EIO : 0;
	mutex_unlock(&log->lock);
	return err;
}

/* Activate what the deferred writes need: one write for each group, not each bio. */
static void log_open_work(struct work_struct *work)
{
	struct track_log *log = container_of(work, struct track_log, open_work);
	unsigned int shift = log->record->region_shift;
	struct bio_list bios;
	struct track_io *io;
	struct bio *bio;
	int err = 0;

	mutex_lock(&log->lock);
	if (log->state == LOG_WAITING) {
		mutex_unlock(&log->lock);
		return;
	}
	spin_lock(&log->deferred_lock);
	bios = log->deferred;
	bio_list_init(&log->deferred);
	spin_unlock(&log->deferred_lock);

	bio_list_for_each(bio, &bios) {
		io = dm_per_bio_data(bio, sizeof(*io));
		log_intend(log, io->first >> shift, io->last >> shift);
	}
	bio_list_for_each(bio, &bios) {
		io = dm_per_bio_data(bio, sizeof(*io));
		err = err ?: log_open_range(log, io->first >> shift, io->last >> shift);
	}
	if (err)
		log_failed(log, err);
	mutex_unlock(&log->lock);

	while ((bio = bio_list_pop(&bios))) {
		io = dm_per_bio_data(bio, sizeof(*io));
		/* Not open: an error, or idle again already. Then it waits on. */
		if (track_mark_deferred(log->record, io))
			submit_bio_noacct(bio);
		else
			track_log_defer(log, bio);
	}
}

/* Idling. */

static int log_idle_batch(struct track_log *log, unsigned int count)
{
	unsigned int i;
	u64 group, last = U64_MAX;
	int err;

	for (i = 0; i < count; i++)
		clear_bit(log->batch[i], log->maps.open);
	WRITE_ONCE(log->active_regions, log->active_regions - count);
	/*
	 * A write that found a region open has marked its blocks once this returns;
	 * one that looks from now on waits. So the bits below are complete.
	 */
	synchronize_rcu_expedited();
	err = log_write_regions(log, log->active, log->batch, count);
	for (i = 0; i < count && !err; i++)
		clear_bit(log->batch[i], log->maps.intent);
	for (i = 0; i < count && !err; i++) {
		group = div_u64(log->batch[i], log->group_regions);
		/* Flushed first: the bits are durable before the intent goes. */
		if (group != last)
			err = log_write_intents(log, group, REQ_PREFLUSH);
		last = group;
	}
	return err;
}

/*
 * Idle regions that were not written to since the last tick, or, to stop, all.
 * True if there may be more.
 */
static bool log_idle(struct track_log *log, bool all)
{
	unsigned int count = 0;
	u64 region = log->cursor;
	int err;

	while (count < LOG_BATCH) {
		region = find_next_bit(log->maps.open, log->regions, region);
		if (region >= log->regions)
			break;
		if (all || !test_and_clear_bit(region, log->maps.used))
			log->batch[count++] = region;
		region++;
	}
	log->cursor = region < log->regions ? region : 0;
	if (count) {
		err = log_idle_batch(log, count);
		if (err)
			log_failed(log, err);
	}
	return count == LOG_BATCH && log->state == LOG_OK && log->cursor;
}

/*
 * After an error, when metadata can be written again: back from "everything" to
 * what is known. The superblock says "full" until all is in place.
 */
static int log_leave_full(struct track_log *log)
{
	u64 region = 0, group;
	unsigned int n;
	int err;

	/* The active epoch's bits follow as regions idle; a frozen one's don't. */
	while (log->frozen && region < log->regions) {
		for (n = 0; n < LOG_BATCH && region < log->regions; n++)
			log->batch[n] = region++;
		err = log_write_regions(log, log->frozen, log->batch, n);
		if (err)
			return err;
		cond_resched();
	}
	bitmap_fill(log->maps.intent, log->regions);
	for (group = 0; group * log->group_regions < log->regions; group++) {
		err = log_write_intents(log, group, 0);
		if (err)
			return err;
		cond_resched();
	}
	err = log_write_super(log, 0);
	if (err)
		return err;
	DMINFO("%s: metadata is written again", log->record->name);
	log->state = LOG_OK;
	return 0;
}

static void log_idle_work(struct work_struct *work)
{
	struct track_log *log = container_of(to_delayed_work(work),
					     struct track_log, idle_work);
	bool more;

	mutex_lock(&log->lock);
	switch (log->state) {
	case LOG_WAITING:
	case LOG_UNTRACKED:
		log_try_full(log);
		break;
	case LOG_FULL:
		if (!log->hold && !log_leave_full(log))
			log_again(log, log_tick());
		else
			log_again(log, 6 * log_tick());
		break;
	case LOG_OK:
		more = !log->hold && log_idle(log, false);
		if (log->state == LOG_OK && log->active_regions)
			log_again(log, more ? 1 : log_tick());
		break;
	}
	mutex_unlock(&log->lock);
}

/* The record's side. */

/**
 * track_log_start - begin to idle regions, when the device resumes
 * @log: the log
 */
void track_log_start(struct track_log *log)
{
	mutex_lock(&log->lock);
	log->running = true;
	log_again(log, log_tick());
	mutex_unlock(&log->lock);
}

/**
 * track_log_stop - write everything down, when the device is suspended
 * @log: the log
 *
 * No write is in flight. Afterwards the record on disk is exact.
 */
void track_log_stop(struct track_log *log)
{
	mutex_lock(&log->lock);
	log->running = false;
	mutex_unlock(&log->lock);
	cancel_delayed_work_sync(&log->idle_work);
	flush_workqueue(log->wq);

	mutex_lock(&log->lock);
	if (log->state == LOG_FULL)
		log_leave_full(log);
	log->cursor = 0;
	while (log->state == LOG_OK && !log->hold && log_idle(log, true))
		cond_resched();
	mutex_unlock(&log->lock);
}

/* Let no region idle until track_log_unhold(). */
void track_log_hold(struct track_log *log)
{
	mutex_lock(&log->lock);
	log->hold++;
	mutex_unlock(&log->lock);
}

void track_log_unhold(struct track_log *log)
{
	mutex_lock(&log->lock);
	log->hold--;
	if (log->state == LOG_OK && log->running)
		queue_delayed_work(log->wq, &log->idle_work, log_tick());
	mutex_unlock(&log->lock);
}

/**
 * track_log_checkpoint - put a new epoch on disk
 * @log: the log, held since before the epochs were swapped
 * @frozen: the old epoch, drained
 * @active: the new one
 *
 * Active regions have their bits of the old epoch in memory only, so these are
 * written first; idle ones have them on disk. Then one superblock changes
 * epochs. A crash before it finds the old epoch, with active regions whole.
 *
 * Errors are kept: the old superblock then still covers all, since no region
 * idles under the new epoch and none activates without its intent.
 */
void track_log_checkpoint(struct track_log *log, struct track_epoch *frozen,
			  struct track_epoch *active)
{
	u64 region = 0;
	unsigned int n;
	int err = 0;

	do {
		/* Not held throughout: writes that wait for a region get in between. */
		mutex_lock(&log->lock);
		for (n = 0; n < LOG_BATCH; n++) {
			region = find_next_bit(log->maps.intent, log->regions, region);
			if (region >= log->regions)
				break;
			log->batch[n] = region++;
		}
		if (log->state == LOG_OK)
			err = log_write_regions(log, frozen, log->batch, n);
		if (n == LOG_BATCH && !err)
			mutex_unlock(&log->lock);
	} while (n == LOG_BATCH && !err);

	log->frozen = frozen;
	log->active = active;
	log_commit(log, err);
	mutex_unlock(&log->lock);
}

/**
 * track_log_release - forget the frozen epoch on disk
 * @log: the log
 *
 * If that fails a crash brings the epoch back, which is no harm.
 */
void track_log_release(struct track_log *log)
{
	mutex_lock(&log->lock);
	log->frozen = NULL;
	log_commit(log, 0);
	mutex_unlock(&log->lock);
}

/* Make groups that hold nothing: no intents, no bits. */
static int log_format(struct track_log *log, u64 groups)
{
	struct track_target *owner = log->record->owner;
	u64 from = log_group_at(log, log->groups), to = log_group_at(log, groups);
	int err;

	if (groups <= log->groups)
		return 0;
	if (to > (u64)bdev_nr_bytes(owner->meta->bdev)) {
		DMERR("%s: the metadata device needs %llu KiB",
		      log->record->name, (to + SZ_1K - 1) / SZ_1K);
		return -ENOSPC;
	}
	err = blkdev_issue_zeroout(owner->meta->bdev, from >> SECTOR_SHIFT,
				   (to - from) >> SECTOR_SHIFT, GFP_NOIO, 0);
	for (; !err && log->groups < groups; log->groups++)
		err = log_write_intents(log, log->groups, 0);
	return err;
}

/**
 * track_log_grow - take over the maps of a larger device
 * @log: the log; the device is suspended and the worker stopped
 * @maps: exchanged
 * @sectors: the new size
 *
 * Return: 0, or an error if the metadata device is too small or fails.
 */
int track_log_grow(struct track_log *log, struct track_maps *maps,
		   sector_t sectors)
{
	struct track_record *r = log->record;
	u64 old = log->regions;
	u64 regions = track_regions(r, track_blocks(r, sectors));
	int err;

	mutex_lock(&log->lock);
	bitmap_copy(maps->open, log->maps.open, old);
	bitmap_copy(maps->used, log->maps.used, old);
	bitmap_copy(maps->intent, log->maps.intent, old);
	err = log_format(log, DIV_ROUND_UP_ULL(regions, log->group_regions));
	if (!err) {
		swap(log->maps.open, maps->open);
		swap(log->maps.used, maps->used);
		swap(log->maps.intent, maps->intent);
		log->regions = regions;
		/* Its new blocks are marked next, and then track_log_resized(). */
		if (log->state == LOG_FULL || log->state == LOG_UNTRACKED)
			log_all_open(log, log->state);
	}
	mutex_unlock(&log->lock);
	return err;
}

/* The new blocks are marked, their intents durable: now the size may be, too. */
void track_log_resized(struct track_log *log)
{
	mutex_lock(&log->lock);
	log->sectors = log->record->sectors;
	log_commit(log, 0);
	mutex_unlock(&log->lock);
}

/**
 * track_log_untrack - let writes pass although metadata cannot be written
 * @log: the log
 *
 * What lies on the metadata device must not be used after a crash.
 *
 * Return: 0, or -EINVAL if metadata can be written.
 */
int track_log_untrack(struct track_log *log)
{
	int err = -EINVAL;

	mutex_lock(&log->lock);
	if (log->state == LOG_WAITING) {
		DMWARN("%s: untracked: overwrite the metadata device before it is used again",
		       log->record->name);
		log_all_open(log, LOG_UNTRACKED);
		err = 0;
	}
	mutex_unlock(&log->lock);
	return err;
}

const char *track_log_state(struct track_log *log)
{
	static const char * const names[] = {
		[LOG_OK] = "ok", [LOG_WAITING] = "waiting",
		[LOG_FULL] = "full", [LOG_UNTRACKED] = "untracked",
	};

	return names[READ_ONCE(log->state)];
}

unsigned int track_log_region_sectors(struct track_log *log)
{
	return 1U << (log->record->block_shift + log->record->region_shift);
}

u64 track_log_active_regions(struct track_log *log)
{
	return READ_ONCE(log->active_regions);
}

size_t track_log_bytes(struct track_log *log)
{
	return sizeof(*log) + LOG_BUFFER +
	       3 * BITS_TO_LONGS(log->regions) * sizeof(long);
}

/* Loading. */

/* All blocks of some regions may have changed. */
static void log_taint(struct track_log *log, struct track_epoch *e, u64 first,
		      u64 last)
{
	u64 block = first << log->record->region_shift;
	u64 end = min((last + 1) << log->record->region_shift, e->blocks);

	if (block < end)
		track_epoch_mark(e, block, end - 1);
}

/* One region's bits, as found on disk. False if they make no sense. */
static bool log_take_region(struct track_log *log, struct track_epoch *e,
			    u64 region, struct track_region *on_disk)
{
	u64 first = region << log->record->region_shift;
	u64 number = le64_to_cpu(on_disk->epoch), block;
	size_t bytes = log_region_bits(log) / BITS_PER_BYTE;
	unsigned long *words = log_region_words(log, e, region);

	/* Never written since the device was formatted. */
	if (!number && !on_disk->crc)
		return !memchr_inv(on_disk->bits, 0, bytes);
	if (le32_to_cpu(on_disk->crc) != log_region_crc(log, on_disk, region) ||
	    number > e->number)
		return false;
	if (number < e->number)
		return true;
	memcpy(words, on_disk->bits, bytes);
	for (block = max(first, e->blocks); block < first + log_region_bits(log); block++)
		__clear_bit(block, e->bits);
	atomic64_add(bitmap_weight(words, log_region_bits(log)), &e->dirty);
	return true;
}

/* The bits of an epoch: all regions, or those without an intent. */
static void log_load_epoch(struct track_log *log, struct track_epoch *e, bool idle)
{
	u64 region = 0, bad = 0, i;
	u64 most = LOG_BUFFER / log->region_bytes;

	while (region < log->regions) {
		u64 left = log->group_regions - region % log->group_regions;
		u64 n = min3(most, left, log->regions - region);
		int err = log_io(log, REQ_OP_READ,
				 log_region_at(log, region, e->number),
				 n * log->region_bytes);

		for (i = 0; i < n; i++, region++) {
			if (idle && test_bit(region, log->maps.intent))
				continue;
			if (!err && log_take_region(log, e, region,
						    log->buffer + i * log->region_bytes))
				continue;
			log_taint(log, e, region, region);
			bad++;
		}
		cond_resched();
	}
	if (bad)
		DMWARN("%s: %llu regions of epoch %llu are damaged, and count as changed",
		       log->record->name, bad, e->number);
}

static void log_load_intents(struct track_log *log)
{
	struct track_intents *in = log->buffer;
	u64 group, region;

	for (group = 0; group * log->group_regions < log->regions; group++) {
		u64 first = group * log->group_regions;
		u64 end = min(first + log->group_regions, log->regions);
		int err = log_io(log, REQ_OP_READ, log_group_at(log, group), log->unit);

		if (err || le32_to_cpu(in->crc) != log_intents_crc(log, in) ||
		    le32_to_cpu(in->group) != group) {
			DMWARN("%s: intents of group %llu are damaged, all of it counts as changed",
			       log->record->name, group);
			bitmap_set(log->maps.intent, first, end - first);
			continue;
		}
		for (region = first; region < end; region++)
			if (in->bits[(region - first) / 8] & 1 << (region - first) % 8)
				__set_bit(region, log->maps.intent);
	}
	/* Until they idle these stay active, in memory as on disk. */
	bitmap_copy(log->maps.open, log->maps.intent, log->regions);
	log->active_regions = bitmap_weight(log->maps.open, log->regions);
	if (log->active_regions)
		DMINFO("%s: %llu regions were active when the device was lost, and count as changed",
		       log->record->name, log->active_regions);
}

static bool log_super_valid(struct track_super *s, u32 unit)
{
	__le32 crc = s->crc;
	bool valid;

	if (le64_to_cpu(s->magic) != SUPER_MAGIC)
		return false;
	s->crc = 0;
	valid = crc32_le(~0, (u8 *)s, unit) == le32_to_cpu(crc);
	s->crc = crc;
	return valid;
}

/* Read the newer superblock. 1 if there is one, 0 if the device is blank. */
static int log_read_super(struct track_log *log, struct track_super *s, char **error)
{
	bool blank = true, found = false;
	u64 at;
	int err, i;

	for (at = 0; at < BLANK_BYTES && blank; at += LOG_BUFFER) {
		err = log_io(log, REQ_OP_READ, at, LOG_BUFFER);
		if (err) {
			*error = "cannot read the metadata device";
			return err;
		}
		blank = !memchr_inv(log->buffer, 0, LOG_BUFFER);
		for (i = 0; i < 2 && !at; i++) {
			struct track_super *new = log->buffer + i * SUPER_SPACING;
			u32 unit = le32_to_cpu(new->unit);

			if (unit < 512 || unit > SUPER_SPACING ||
			    !log_super_valid(new, unit))
				continue;
			if (!found || le64_to_cpu(new->sequence) > le64_to_cpu(s->sequence))
				*s = *new;
			found = true;
		}
	}
	if (!found && !blank)
		*error = "the metadata device holds something else; to use it zero its first 128 KiB";
	return found ? 1 : blank ? 0 : -EINVAL;
}

static void log_geometry(struct track_log *log, u32 unit)
{
	log->unit = unit;
	log->group_regions = (unit - sizeof(struct track_intents)) * BITS_PER_BYTE;
	log->region_bytes = round_up(sizeof(struct track_region) +
				     log_region_bits(log) / BITS_PER_BYTE, unit);
	log->seed = crc32_le(~0, log->record->uuid.b, sizeof(uuid_t));
}

/* A log that exists: take its record over. */
static int log_load(struct track_log *log, struct track_super *s, char **error)
{
	struct track_record *r = log->record;
	u32 flags = le32_to_cpu(s->flags), unit = le32_to_cpu(s->unit);
	u64 number = le64_to_cpu(s->epoch), frozen = le64_to_cpu(s->frozen);
	u64 sectors = le64_to_cpu(s->sectors), region;

	*error = NULL;
	if (le32_to_cpu(s->version) != SUPER_VERSION)
		*error = "the metadata is of another version";
	else if (le32_to_cpu(s->block_sectors) != 1U << r->block_shift)
		*error = "the metadata is of another block size";
	else if (le32_to_cpu(s->region_sectors) != track_log_region_sectors(log))
		*error = "the metadata is of another region size";
	else if (bdev_logical_block_size(r->owner->meta->bdev) > unit)
		*error = "the metadata device's sectors are larger than they were";
	else if (sectors > r->sectors)
		*error = "the device is smaller than its record";
	else if (!number || (frozen && frozen != number - 1) || !sectors)
		*error = "the metadata is damaged";
	if (*error)
		return -EINVAL;

	import_uuid(&r->uuid, s->uuid);
	import_uuid(&r->released, s->released);
	log_geometry(log, unit);
	log->sequence = le64_to_cpu(s->sequence);
	log->groups = le64_to_cpu(s->groups);
	log->sectors = sectors;
	if (log->groups < DIV_ROUND_UP_ULL(track_regions(r, track_blocks(r, sectors)),
					   log->group_regions) ||
	    log_group_at(log, log->groups) > (u64)bdev_nr_bytes(r->owner->meta->bdev)) {
		*error = "the metadata device is smaller than it was";
		return -EINVAL;
	}

	/* The record is as large as the disk says; what came since is new. */
	r->sectors = sectors;
	r->blocks = track_blocks(r, sectors);
	log->regions = track_regions(r, r->blocks);
	log->active = &r->epochs[number & 1];
	log->active->number = number;
	log->active->blocks = r->blocks;
	log->active->lost = flags & SUPER_LOST;
	RCU_INIT_POINTER(r->active, log->active);
	if (frozen) {
		log->frozen = &r->epochs[frozen & 1];
		log->frozen->number = frozen;
		log->frozen->blocks = r->blocks;
		log->frozen->lost = flags & SUPER_FROZEN_LOST;
		log->frozen->ready = true;
		percpu_ref_kill(&log->frozen->writes);
		r->frozen = log->frozen;
	}
	if (flags & SUPER_FULL) {
		DMWARN("%s: metadata was incomplete, every block counts as changed", r->name);
		log_taint(log, log->active, 0, log->regions - 1);
		if (log->frozen)
			log_taint(log, log->frozen, 0, log->regions - 1);
		log_all_open(log, LOG_FULL);
		return 0;
	}
	log_load_intents(log);
	log_load_epoch(log, log->active, true);
	if (log->frozen)
		log_load_epoch(log, log->frozen, false);
	for_each_set_bit(region, log->maps.intent, log->regions)
		log_taint(log, log->active, region, region);
	return 0;
}

/**
 * track_log_create - load a log, or format a blank device for one
 * @r: the record, with its epochs made
 * @t: the table; owns @r for now
 * @maps: taken over
 * @error: why not
 *
 * Afterwards the record may be smaller than the table: it has grown since.
 *
 * Return: 0 or an error.
 */
int track_log_create(struct track_record *r, struct track_target *t,
		     struct track_maps *maps, char **error)
{
	struct track_log *log = kzalloc(sizeof(*log), GFP_KERNEL);
	struct track_super super;
	int err = -ENOMEM;

	*error = "cannot allocate the log";
	if (!log)
		return err;
	r->log = log;
	log->record = r;
	mutex_init(&log->lock);
	spin_lock_init(&log->deferred_lock);
	bio_list_init(&log->deferred);
	INIT_WORK(&log->open_work, log_open_work);
	INIT_DELAYED_WORK(&log->idle_work, log_idle_work);
	swap(log->maps, *maps);
	log->sectors = r->sectors;
	log->regions = track_regions(r, r->blocks);
	log->active = rcu_dereference_protected(r->active, true);
	log_geometry(log, max_t(u32, 512, bdev_logical_block_size(t->meta->bdev)));
	log->buffer = kmalloc(LOG_BUFFER, GFP_KERNEL);
	log->wq = alloc_ordered_workqueue("dm-track", WQ_MEM_RECLAIM);
	if (!log->buffer || !log->wq)
		return err;
	if (log->unit > SUPER_SPACING || bdev_nr_bytes(t->meta->bdev) < BLANK_BYTES) {
		*error = "the metadata device is too small, or its sectors too large";
		return -EINVAL;
	}

	mutex_lock(&log->lock);
	err = log_read_super(log, &super, error);
	if (err > 0) {
		err = log_load(log, &super, error);
	} else if (!err) {
		err = log_format(log, DIV_ROUND_UP_ULL(log->regions, log->group_regions)) ?:
		      log_write_super(log, 0);
		*error = "cannot format the metadata device";
	}
	mutex_unlock(&log->lock);
	return err;
}

void track_log_destroy(struct track_log *log)
{
	if (!log)
		return;
	if (log->wq) {
		cancel_delayed_work_sync(&log->idle_work);
		destroy_workqueue(log->wq);
	}
	track_maps_free(&log->maps);
	kfree(log->buffer);
	kfree(log);
}
