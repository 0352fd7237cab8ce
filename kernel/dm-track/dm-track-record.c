// SPDX-License-Identifier: GPL-2.0
/*
 * The record: two bitmaps that take turns.
 *
 * A bit is only ever set in the active epoch and never cleared there; what was
 * reported is not cleared but released, whole. So no write can fall between
 * reading the record and clearing it.
 */
#include "dm-track.h"

#include <linux/sched/mm.h>
#include <linux/vmalloc.h>

/**
 * track_bits_set - set a range of bits, atomically word by word
 * @bits: the bitmap
 * @first: first bit
 * @last: last bit
 *
 * Each word is read before it is written: words that are set already, which is
 * the common case, stay shared between the caches of all CPUs.
 *
 * Return: how many bits were clear before.
 */
unsigned long track_bits_set(unsigned long *bits, u64 first, u64 last)
{
	u64 word = first / BITS_PER_LONG, end = last / BITS_PER_LONG;
	unsigned long mask = BITMAP_FIRST_WORD_MASK(first), old, added = 0;

	for (; word <= end; word++, mask = ~0UL) {
		if (word == end)
			mask &= BITMAP_LAST_WORD_MASK(last + 1);
		if ((READ_ONCE(bits[word]) & mask) == mask)
			continue;
		old = atomic_long_fetch_or(mask, (atomic_long_t *)&bits[word]);
		added += hweight_long(mask & ~old);
	}
	return added;
}

static unsigned long *track_bitmap(u64 bits, struct track_maps *maps)
{
	size_t bytes = BITS_TO_LONGS(bits) * sizeof(long);

	maps->bytes += bytes;
	return __vmalloc(bytes, GFP_KERNEL | __GFP_ZERO | __GFP_NOWARN);
}

/**
 * track_maps_alloc - memory for a device of some size
 * @maps: filled; to be freed by track_maps_free(), after a failure too
 * @r: the record, for its units
 * @blocks: of the device
 * @log: there is a log
 *
 * Return: 0 or -ENOMEM.
 */
int track_maps_alloc(struct track_maps *maps, const struct track_record *r,
		     u64 blocks, bool log)
{
	u64 regions = track_regions(r, blocks);
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(maps->bits); i++) {
		maps->bits[i] = track_bitmap(regions << r->region_shift, maps);
		if (!maps->bits[i])
			return -ENOMEM;
	}
	if (!log)
		return 0;
	maps->open = track_bitmap(regions, maps);
	maps->used = track_bitmap(regions, maps);
	maps->intent = track_bitmap(regions, maps);
	return maps->open && maps->used && maps->intent ? 0 : -ENOMEM;
}

void track_maps_free(struct track_maps *maps)
{
	vfree(maps->bits[0]);
	vfree(maps->bits[1]);
	vfree(maps->open);
	vfree(maps->used);
	vfree(maps->intent);
	memset(maps, 0, sizeof(*maps));
}

static void track_epoch_release(struct percpu_ref *writes)
{
	struct track_epoch *e = container_of(writes, struct track_epoch, writes);

	complete_all(&e->drained);
}

/**
 * track_record_init - make the two epochs
 * @r: the record, its sizes filled in
 * @maps: bitmaps; taken over
 *
 * Return: 0 or -ENOMEM; track_record_exit() is due either way.
 */
int track_record_init(struct track_record *r, struct track_maps *maps)
{
	unsigned int i;
	int err;

	mutex_init(&r->control);
	mutex_init(&r->lock);
	uuid_gen(&r->uuid);
	for (i = 0; i < ARRAY_SIZE(r->epochs); i++) {
		struct track_epoch *e = &r->epochs[i];

		e->blocks = r->blocks;
		e->bits = maps->bits[i];
		maps->bits[i] = NULL;
		init_completion(&e->drained);
	}
	for (i = 0; i < ARRAY_SIZE(r->epochs); i++) {
		err = percpu_ref_init(&r->epochs[i].writes, track_epoch_release,
				      PERCPU_REF_ALLOW_REINIT, GFP_KERNEL);
		if (err)
			return err;
	}
	/* What was written before is not known. */
	r->epochs[1].number = 1;
	r->epochs[1].lost = true;
	RCU_INIT_POINTER(r->active, &r->epochs[1]);
	return 0;
}

void track_record_exit(struct track_record *r)
{
	unsigned int i;

	/* The device is gone, but the last step of the drain may be on its way. */
	if (r->frozen)
		wait_for_completion(&r->frozen->drained);
	for (i = 0; i < ARRAY_SIZE(r->epochs); i++) {
		percpu_ref_exit(&r->epochs[i].writes);
		vfree(r->epochs[i].bits);
	}
}

/* Memory that the record holds in all. */
size_t track_record_bytes(struct track_record *r)
{
	u64 bits = track_regions(r, READ_ONCE(r->blocks)) << r->region_shift;

	return sizeof(*r) + 2 * bits / BITS_PER_BYTE +
	       (r->log ? track_log_bytes(r->log) : 0);
}

static struct track_epoch *track_other(struct track_record *r,
				       struct track_epoch *e)
{
	return e == &r->epochs[0] ? &r->epochs[1] : &r->epochs[0];
}

/* End the active epoch. What is written from now on is the next one's. */
static void track_record_swap(struct track_record *r)
{
	struct track_epoch *old = track_active(r);
	struct track_epoch *next = track_other(r, old);

	/* Regions must not be filed under the new epoch before the log knows it. */
	if (r->log)
		track_log_hold(r->log);

	next->number = old->number + 1;
	next->lost = false;
	next->ready = false;

	mutex_lock(&r->lock);
	next->blocks = r->blocks;
	/* Pairs with rcu_dereference() in track_mark(): clean bits first. */
	rcu_assign_pointer(r->active, next);
	r->frozen = old;
	mutex_unlock(&r->lock);

	/*
	 * A write that still saw the old epoch has taken its reference and marked its
	 * blocks once this returns: track_mark() does both in one RCU section.
	 * Only then may the first reference go. Expedited, since a file system
	 * may be frozen meanwhile.
	 */
	synchronize_rcu_expedited();
	percpu_ref_kill(&old->writes);
}

/* What is left to do once the frozen epoch's writes have ended. */
static void track_record_ready(struct track_record *r)
{
	struct track_epoch *e = r->frozen;

	if (r->log) {
		track_log_checkpoint(r->log, e, track_active(r));
		track_log_unhold(r->log);
	}
	mutex_lock(&r->lock);
	e->ready = true;
	mutex_unlock(&r->lock);
}

/*
 * Wait until no write is in flight that marked the frozen epoch. A write that
 * was marked there may land long after the swap: who copied its block before
 * would miss it, and it is not marked again.
 */
static int track_record_drain(struct track_record *r)
{
	int err = wait_for_completion_killable(&r->frozen->drained);

	if (!err && !r->frozen->ready)
		track_record_ready(r);
	return err;
}

/* A killed checkpoint leaves a frozen epoch behind; this ends what it began. */
void track_record_settle(struct track_record *r)
{
	lockdep_assert_held(&r->control);
	if (!r->frozen)
		return;
	wait_for_completion(&r->frozen->drained);
	if (!r->frozen->ready)
		track_record_ready(r);
}

/**
 * track_record_checkpoint - end the epoch and freeze its record
 * @r: the record; @r->control held
 * @epoch: number of the frozen epoch
 *
 * While a record is frozen, asking again returns the same one.
 *
 * Return: 0, or -ERESTARTSYS if killed while writes drain; the next call then
 * goes on.
 */
int track_record_checkpoint(struct track_record *r, u64 *epoch)
{
	lockdep_assert_held(&r->control);
	if (!r->frozen)
		track_record_swap(r);
	*epoch = r->frozen->number;
#ifdef DM_TRACK_TEST_NO_DRAIN
	/* For the test that shows what the drain is good for. */
	mutex_lock(&r->lock);
	r->frozen->ready = true;
	mutex_unlock(&r->lock);
	return 0;
#else
	return track_record_drain(r);
#endif
}

/* The frozen epoch's place becomes the spare one: empty, and ready for writes. */
static void track_record_drop(struct track_record *r)
{
	struct track_epoch *e = r->frozen;
	u64 bytes = (track_regions(r, r->blocks) << r->region_shift) / BITS_PER_BYTE;
	u64 at;

	mutex_lock(&r->lock);
	r->frozen = NULL;
	mutex_unlock(&r->lock);

	/* @e is unreachable from here on: /proc reads it under the lock only. */
	for (at = 0; at < bytes && atomic64_read(&e->dirty); at += SZ_1M) {
		memset((char *)e->bits + at, 0, min_t(u64, SZ_1M, bytes - at));
		cond_resched();
	}
	atomic64_set(&e->dirty, 0);
	e->ready = false;
	/* Drained, so the count is zero and nothing completes it meanwhile. */
	reinit_completion(&e->drained);
	percpu_ref_reinit(&e->writes);
}

/**
 * track_record_release - forget a frozen record that has been put to use
 * @r: the record; @r->control held
 * @epoch: the number that the checkpoint reported
 * @name: by which the caller knows the epoch, or zero. It is kept with the record:
 *	what the record holds came after the epoch of this name
 *
 * Return: 0, -ESTALE if another epoch or none is frozen, or -ERESTARTSYS.
 */
int track_record_release(struct track_record *r, u64 epoch, const uuid_t *name)
{
	int err;

	lockdep_assert_held(&r->control);
	if (!r->frozen || r->frozen->number != epoch)
		return -ESTALE;
	err = track_record_drain(r);
	if (err)
		return err;
	mutex_lock(&r->lock);
	r->released = *name;
	mutex_unlock(&r->lock);
	if (r->log)
		track_log_release(r->log);
	track_record_drop(r);
	return 0;
}

/**
 * track_record_abort - put the frozen record back into the active one
 * @r: the record; @r->control held
 *
 * Return: 0, -ESTALE if none is frozen, or -ERESTARTSYS.
 */
int track_record_abort(struct track_record *r)
{
	struct track_epoch *active = track_active(r), *e;
	u64 words = BITS_TO_LONGS(r->blocks), word, begin;
	int err;

	lockdep_assert_held(&r->control);
	if (!r->frozen)
		return -ESTALE;
	err = track_record_drain(r);
	if (err)
		return err;
	e = r->frozen;

	/*
	 * As for a write: the intent, then the mark. Held, no intent is dropped
	 * between. Should the log not take it, it keeps the frozen epoch instead.
	 */
	if (r->log)
		track_log_hold(r->log);
	for (word = 0; word < words; word++) {
		if (!e->bits[word])
			continue;
		for (begin = word; word + 1 < words && e->bits[word + 1];)
			word++;
		if (r->log)
			track_log_open(r->log, begin * BITS_PER_LONG,
				       min((word + 1) * BITS_PER_LONG, r->blocks) - 1);
		cond_resched();
	}
	for (word = 0; word < words; word++) {
		unsigned long old;

		if (e->bits[word]) {
			old = atomic_long_fetch_or(e->bits[word],
						   (atomic_long_t *)&active->bits[word]);
			atomic64_add(hweight_long(e->bits[word] & ~old), &active->dirty);
		}
		if (!(word % SZ_64K))
			cond_resched();
	}
	active->lost |= e->lost;
	if (r->log) {
		track_log_release(r->log);
		track_log_unhold(r->log);
	}
	track_record_drop(r);
	return 0;
}

/**
 * track_record_clear - forget everything, as writing to /proc/track/NAME asks
 * @r: the record; @r->control held
 *
 * On a live device what is written between reading and clearing is missed: the
 * reader has not seen it and the next one won't. The epoch's number jumps and
 * its name is gone, so that who follows checkpoints notices.
 *
 * Return: 0 or -ERESTARTSYS.
 */
int track_record_clear(struct track_record *r)
{
	u64 epoch;
	int err;

	lockdep_assert_held(&r->control);
	if (r->frozen) {
		err = track_record_release(r, r->frozen->number, &uuid_null);
		if (err)
			return err;
	}
	err = track_record_checkpoint(r, &epoch);
	return err ?: track_record_release(r, epoch, &uuid_null);
}

/* Mark blocks that no write goes with. */
static int track_record_mark_range(struct track_record *r, u64 first, u64 last)
{
	int err = 0;

	if (r->log) {
		track_log_hold(r->log);
		err = track_log_open(r->log, first, last);
	}
	/* Under @r->control nothing swaps epochs, so the active one stays. */
	track_epoch_mark(track_active(r), first, last);
	if (r->log)
		track_log_unhold(r->log);
	return err;
}

/**
 * track_record_mark - mark blocks as changed
 * @r: the record; @r->control held
 * @first: first block
 * @count: how many
 *
 * Return: 0, -ERANGE, or -EIO if the mark would not outlive a crash.
 */
int track_record_mark(struct track_record *r, u64 first, u64 count)
{
	lockdep_assert_held(&r->control);
	if (!count || first >= r->blocks || count > r->blocks - first)
		return -ERANGE;
	return track_record_mark_range(r, first, first + count - 1);
}

/**
 * track_record_grow - follow a device that has become larger
 * @r: the record; @r->control held, the device suspended
 * @maps: bitmaps of the new size; exchanged for the old ones
 * @sectors: the new size
 *
 * What is new counts as changed, and so does a last block that was short. A
 * frozen epoch keeps its own size.
 *
 * Return: 0 or an error of the log.
 */
int track_record_grow(struct track_record *r, struct track_maps *maps,
		      sector_t sectors)
{
	u64 old = track_regions(r, r->blocks) << r->region_shift;
	u64 first = r->sectors >> r->block_shift;
	unsigned int i;
	int err;

	lockdep_assert_held(&r->control);
	if (r->log) {
		err = track_log_grow(r->log, maps, sectors);
		if (err)
			return err;
	}
	/*
	 * The device is suspended, so no write holds a bitmap; the log's worker is
	 * stopped; readers in /proc hold the lock.
	 */
	mutex_lock(&r->lock);
	for (i = 0; i < ARRAY_SIZE(r->epochs); i++) {
		memcpy(maps->bits[i], r->epochs[i].bits, old / BITS_PER_BYTE);
		swap(maps->bits[i], r->epochs[i].bits);
	}
	r->sectors = sectors;
	r->blocks = track_blocks(r, sectors);
	track_active(r)->blocks = r->blocks;
	mutex_unlock(&r->lock);
	/* Should the log not take it, it keeps the old size too, and grows again. */
	track_record_mark_range(r, first, r->blocks - 1);
	if (r->log)
		track_log_resized(r->log);
	return 0;
}
