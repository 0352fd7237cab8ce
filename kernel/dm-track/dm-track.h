/* SPDX-License-Identifier: GPL-2.0 */
/*
 * dm-track: which blocks of a device were written, epoch by epoch.
 *
 * A record belongs to a mapped device and outlives its tables. It has two
 * epochs' bitmaps: one is active and takes marks, the other is spare, or frozen
 * by a checkpoint until it is released.
 *
 * Locks, outermost first:
 *
 * records_lock     the list of records, their references, their making and end
 * record->control  one checkpoint, release, abort, clear or mark at a time; may
 *                  be held while writes drain and metadata is written
 * record->lock     which epoch is frozen, and the size; held briefly, so that
 *                  /proc and status never wait for I/O
 * log->lock        the states of regions and all metadata I/O; never held while
 *                  data is waited for
 *
 * The map path takes none of them. It runs under RCU, see track_mark().
 */
#ifndef DM_TRACK_H
#define DM_TRACK_H

#include <linux/bio.h>
#include <linux/completion.h>
#include <linux/device-mapper.h>
#include <linux/mutex.h>
#include <linux/percpu-refcount.h>
#include <linux/proc_fs.h>
#include <linux/uuid.h>

#define DM_MSG_PREFIX "track"

/* Bitmaps go to disk and to user space as they lie in memory. */
#if BITS_PER_LONG != 64 || defined(__BIG_ENDIAN)
#error "dm-track needs a little-endian machine of 64 bits"
#endif

struct track_log;

/**
 * struct track_epoch - the blocks written between two checkpoints
 * @number: rises by one with each checkpoint; from 1
 * @lost: the epoch does not hold every change since the one before it
 * @ready: frozen, drained and, with a log, durable
 * @blocks: blocks of the device as the epoch ended
 * @dirty: bits that are set
 * @bits: one for each block
 * @writes: held by each write from its mark to its end
 * @drained: no write that marked here is in flight any more
 */
struct track_epoch {
	u64 number;
	bool lost;
	bool ready;
	u64 blocks;
	atomic64_t dirty;
	unsigned long *bits;
	struct percpu_ref writes;
	struct completion drained;
};

/**
 * struct track_record - what is known of a mapped device's writes
 * @list: in the list of records
 * @md: the device; not a reference, its tables hold the record
 * @refs: tables that use the record
 * @name: the device's name when the record was made; names it in /proc/track
 * @uuid: minted with the record; another one means another record
 * @released: name that whoever released an epoch last has given it, or zero
 * @control: see above
 * @lock: see above
 * @sectors: size of the device
 * @blocks: the same in blocks
 * @block_shift: log2 of a block's sectors
 * @region_shift: log2 of a region's blocks
 * @epochs: number N lives in N & 1
 * @active: takes the marks
 * @frozen: not released yet, or NULL
 * @owner: the table whose devices may be used; NULL when there is none
 * @log: the write-intent log, or NULL
 * @proc: /proc/track/NAME
 * @proc_frozen: /proc/track/NAME.frozen
 */
struct track_record {
	struct list_head list;
	struct mapped_device *md;
	unsigned int refs;
	char name[DM_NAME_LEN];
	uuid_t uuid;
	uuid_t released;
	struct mutex control;
	struct mutex lock;
	sector_t sectors;
	u64 blocks;
	unsigned int block_shift;
	unsigned int region_shift;
	struct track_epoch epochs[2];
	struct track_epoch __rcu *active;
	struct track_epoch *frozen;
	struct track_target *owner;
	struct track_log *log;
	struct proc_dir_entry *proc;
	struct proc_dir_entry *proc_frozen;
};

/**
 * struct track_maps - memory that depends on the device's size
 * @bits: of both epochs, whole regions
 * @open: regions that writes may pass to
 * @used: regions written lately
 * @intent: regions that are active on disk
 * @bytes: size of all of them
 */
struct track_maps {
	unsigned long *bits[2];
	unsigned long *open;
	unsigned long *used;
	unsigned long *intent;
	size_t bytes;
};

/**
 * struct track_target - one table
 * @record: shared by all tables of the device
 * @dev: holds the data
 * @start: where on @dev
 * @meta: holds the log, or NULL
 * @maps: for a device that this table makes larger; empty otherwise
 */
struct track_target {
	struct track_record *record;
	struct dm_dev *dev;
	sector_t start;
	struct dm_dev *meta;
	struct track_maps maps;
};

/**
 * struct track_io - what is kept with each bio
 * @epoch: where a write is marked; NULL for all else
 * @first: first block; set while the bio waits for a region
 * @last: last block
 */
struct track_io {
	struct track_epoch *epoch;
	u64 first;
	u64 last;
};

static inline u64 track_blocks(const struct track_record *r, sector_t sectors)
{
	return (sectors + (1ULL << r->block_shift) - 1) >> r->block_shift;
}

static inline u64 track_regions(const struct track_record *r, u64 blocks)
{
	return (blocks + (1ULL << r->region_shift) - 1) >> r->region_shift;
}

static inline struct track_epoch *track_active(struct track_record *r)
{
	return rcu_dereference_protected(r->active,
					 lockdep_is_held(&r->control) ||
					 lockdep_is_held(&r->lock));
}

/* dm-track-record.c */
unsigned long track_bits_set(unsigned long *bits, u64 first, u64 last);
int track_maps_alloc(struct track_maps *maps, const struct track_record *r,
		     u64 blocks, bool log);
void track_maps_free(struct track_maps *maps);
int track_record_init(struct track_record *r, struct track_maps *maps);
void track_record_exit(struct track_record *r);
size_t track_record_bytes(struct track_record *r);
void track_record_settle(struct track_record *r);
int track_record_grow(struct track_record *r, struct track_maps *maps,
		      sector_t sectors);
int track_record_checkpoint(struct track_record *r, u64 *epoch);
int track_record_release(struct track_record *r, u64 epoch, const uuid_t *name);
int track_record_abort(struct track_record *r);
int track_record_clear(struct track_record *r);
int track_record_mark(struct track_record *r, u64 first, u64 count);

/**
 * track_epoch_mark - note that blocks change
 * @e: the epoch; the caller holds a reference to its @writes, or keeps it active
 * @first: first block
 * @last: last block
 */
static inline void track_epoch_mark(struct track_epoch *e, u64 first, u64 last)
{
	unsigned long added;

	if (likely(first == last)) {
		if (!test_bit(first, e->bits) && !test_and_set_bit(first, e->bits))
			atomic64_inc(&e->dirty);
		return;
	}
	added = track_bits_set(e->bits, first, last);
	if (added)
		atomic64_add(added, &e->dirty);
}

/* dm-track-proc.c */
int track_proc_add(struct track_record *r);
void track_proc_remove(struct track_record *r);
int track_proc_init(void);
void track_proc_exit(void);

/* dm-track-log.c */
int track_log_create(struct track_record *r, struct track_target *t,
		     struct track_maps *maps, char **error);
void track_log_destroy(struct track_log *log);
int track_log_grow(struct track_log *log, struct track_maps *maps,
		   sector_t sectors);
void track_log_resized(struct track_log *log);
bool track_log_covers(struct track_log *log, u64 first, u64 last);
void track_log_defer(struct track_log *log, struct bio *bio);
void track_log_start(struct track_log *log);
void track_log_stop(struct track_log *log);
void track_log_hold(struct track_log *log);
void track_log_unhold(struct track_log *log);
int track_log_open(struct track_log *log, u64 first, u64 last);
void track_log_checkpoint(struct track_log *log, struct track_epoch *frozen,
			  struct track_epoch *active);
void track_log_release(struct track_log *log);
int track_log_untrack(struct track_log *log);
const char *track_log_state(struct track_log *log);
unsigned int track_log_region_sectors(struct track_log *log);
u64 track_log_active_regions(struct track_log *log);
size_t track_log_bytes(struct track_log *log);

/* dm-track-target.c */
bool track_mark_deferred(struct track_record *r, struct track_io *io);

#endif
