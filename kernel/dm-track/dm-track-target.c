// SPDX-License-Identifier: GPL-2.0
/*
 * dm-track: a linear target that writes down which blocks were written.
 *
 * track <dev> <offset> <block_sectors> [<#opts> meta <dev> region_sectors <n>]
 *
 * After "dsync: Efficient Block-wise Synchronization of Multi-Gigabyte Binary
 * Data" (Knauth and Fetzer, 2013), with epochs instead of a list that is cleared,
 * and with a write-intent log.
 */
#include "dm-track.h"

#include <linux/log2.h>
#include <linux/module.h>

#define BLOCK_SECTORS_MIN	8U		/* 4 KiB */
#define BLOCK_SECTORS_MAX	2048U		/* 1 MiB */
#define REGION_SECTORS		32768U		/* 16 MiB */
#define REGION_BLOCKS_MIN	64U		/* whole words */
#define REGION_BLOCKS_MAX	(1U << 17)

static unsigned int max_bitmap_mib = 128;
module_param(max_bitmap_mib, uint, 0644);
MODULE_PARM_DESC(max_bitmap_mib, "Largest bitmap of a device in MiB; each has two (default 128)");

static LIST_HEAD(records);
static DEFINE_MUTEX(records_lock);

/**
 * track_mark - mark a write's blocks in the active epoch
 * @r: the record
 * @io: the write's; remembers the epoch until it ends
 * @first: first block
 * @last: last block
 *
 * Marked before the data is submitted, so that whatever a reader of the device
 * can see is marked. All happens in one RCU section, for two who wait for its
 * end: a checkpoint, after which no write marks the old epoch or takes its
 * reference (track_record_swap()), and a region that goes idle, after which
 * nobody marks its blocks (log_idle_batch()). The active epoch's count cannot be
 * zero here: its first reference goes only after such a wait.
 *
 * Return: false if a region has to be activated first; nothing is marked then.
 */
static __always_inline bool track_mark(struct track_record *r, struct track_io *io,
				       u64 first, u64 last)
{
	struct track_epoch *e;

	rcu_read_lock();
	if (r->log && !track_log_covers(r->log, first, last)) {
		rcu_read_unlock();
		return false;
	}
	e = rcu_dereference(r->active);
	percpu_ref_get(&e->writes);
	track_epoch_mark(e, first, last);
	rcu_read_unlock();
	io->epoch = e;
	return true;
}

/* The same for a write that had to wait. */
bool track_mark_deferred(struct track_record *r, struct track_io *io)
{
	return track_mark(r, io, io->first, io->last);
}

static int track_map(struct dm_target *ti, struct bio *bio)
{
	struct track_target *t = ti->private;
	struct track_io *io = dm_per_bio_data(bio, sizeof(*io));
	sector_t sector = dm_target_offset(ti, bio->bi_iter.bi_sector);
	u64 first, last;

	bio_set_dev(bio, t->dev->bdev);
	bio->bi_iter.bi_sector = t->start + sector;
	io->epoch = NULL;
	/* Discards, write-zeroes and secure erase are writes too, by their sectors. */
	if (!op_is_write(bio_op(bio)) || !bio_sectors(bio))
		return DM_MAPIO_REMAPPED;

	first = sector >> t->record->block_shift;
	last = (sector + bio_sectors(bio) - 1) >> t->record->block_shift;
	if (likely(track_mark(t->record, io, first, last)))
		return DM_MAPIO_REMAPPED;
	io->first = first;
	io->last = last;
	track_log_defer(t->record->log, bio);
	return DM_MAPIO_SUBMITTED;
}

static int track_end_io(struct dm_target *ti, struct bio *bio, blk_status_t *error)
{
	struct track_io *io = dm_per_bio_data(bio, sizeof(*io));

	/* Failed or not: what a failed write left behind is anybody's guess. */
	if (io->epoch)
		percpu_ref_put(&io->epoch->writes);
	return DM_ENDIO_DONE;
}

/* Tables come and go, the record stays as long as the device has one. */

static void track_record_free(struct track_record *r)
{
	track_log_destroy(r->log);
	track_record_exit(r);
	kfree(r);
}

static void track_record_put(struct track_record *r)
{
	mutex_lock(&records_lock);
	if (!--r->refs) {
		list_del(&r->list);
		track_proc_remove(r);
		track_record_free(r);
	}
	mutex_unlock(&records_lock);
}

static struct track_record *track_record_of(struct mapped_device *md)
{
	struct track_record *r;

	list_for_each_entry(r, &records, list)
		if (r->md == md)
			return r;
	return NULL;
}

/* Names outlive a renaming of the device, so two devices may come to have one. */
static bool track_name_free(const char *name)
{
	size_t len = strlen(name), suffix = strlen(".frozen");
	struct track_record *r;

	if (len >= suffix && !strcmp(name + len - suffix, ".frozen"))
		return false;
	list_for_each_entry(r, &records, list)
		if (!strcmp(r->name, name))
			return false;
	return true;
}

/* What the arguments ask for, in the units of a record that may not exist. */
struct track_args {
	unsigned int block_sectors;
	unsigned int region_sectors;
};

static int track_record_new(struct dm_target *ti, struct track_args *args)
{
	struct track_target *t = ti->private;
	struct track_record *r = kzalloc(sizeof(*r), GFP_KERNEL);
	struct track_maps maps = {};
	int err = -ENOMEM;

	ti->error = "cannot allocate the record";
	if (!r)
		return err;
	r->md = dm_table_get_md(ti->table);
	r->refs = 1;
	r->owner = t;
	r->sectors = ti->len;
	r->block_shift = ilog2(args->block_sectors);
	r->region_shift = ilog2(args->region_sectors / args->block_sectors);
	r->blocks = track_blocks(r, ti->len);
	err = dm_copy_name_and_uuid(r->md, r->name, NULL);
	if (err) {
		ti->error = "the device has no name";
		kfree(r);
		return err;
	}
	if (!track_name_free(r->name)) {
		ti->error = "/proc/track has a file of this device's name";
		kfree(r);
		return -EEXIST;
	}

	err = track_maps_alloc(&maps, r, r->blocks, t->meta) ?: track_record_init(r, &maps);
	if (!err && t->meta)
		err = track_log_create(r, t, &maps, &ti->error);
	if (!err) {
		ti->error = "cannot make files in /proc/track";
		err = track_proc_add(r);
	}
	track_maps_free(&maps);
	if (err) {
		track_record_free(r);
		return err;
	}
	list_add(&r->list, &records);
	t->record = r;
	return 0;
}

/* A table for a device that has a record: it must fit. */
static int track_record_join(struct dm_target *ti, struct track_record *r,
			     struct track_args *args)
{
	struct track_target *t = ti->private;

	ti->error = NULL;
	if (args->block_sectors != 1U << r->block_shift)
		ti->error = "a record cannot change its block size";
	else if (!t->meta != !r->log)
		ti->error = "a record cannot gain or lose its metadata device";
	else if (r->log && args->region_sectors != track_log_region_sectors(r->log))
		ti->error = "a record cannot change its region size";
	else if (ti->len < r->sectors)
		ti->error = "a record cannot shrink; remove the device and create it again";
	if (ti->error)
		return -EINVAL;
	r->refs++;
	t->record = r;
	return 0;
}

static int track_record_get(struct dm_target *ti, struct track_args *args)
{
	struct track_target *t = ti->private;
	struct track_record *r;
	int err;

	mutex_lock(&records_lock);
	r = track_record_of(dm_table_get_md(ti->table));
	err = r ? track_record_join(ti, r, args) : track_record_new(ti, args);
	mutex_unlock(&records_lock);
	if (err)
		return err;

	/* Memory for growing is taken now: at resume writes are waiting. */
	r = t->record;
	if (ti->len > r->sectors) {
		ti->error = "cannot allocate memory for growing";
		err = track_maps_alloc(&t->maps, r, track_blocks(r, ti->len), r->log);
	}
	return err;
}

static void track_dtr(struct dm_target *ti)
{
	struct track_target *t = ti->private;

	if (t->record) {
		mutex_lock(&t->record->control);
		if (t->record->owner == t)
			t->record->owner = NULL;
		mutex_unlock(&t->record->control);
		track_record_put(t->record);
	}
	track_maps_free(&t->maps);
	if (t->meta)
		dm_put_device(ti, t->meta);
	if (t->dev)
		dm_put_device(ti, t->dev);
	kfree(t);
}

static int track_parse_options(struct dm_target *ti, struct dm_arg_set *as,
			       struct track_args *args)
{
	static const struct dm_arg counts[] = {
		{ 0, 4, "invalid number of options" },
		{ 1, INT_MAX, "invalid region_sectors" },
	};
	struct track_target *t = ti->private;
	bool sized = false;
	unsigned int left;
	int err;

	if (!as->argc)
		return 0;
	err = dm_read_arg_group(counts, as, &left, &ti->error);
	while (!err && left >= 2) {
		const char *name = dm_shift_arg(as);

		left -= 2;
		if (!strcasecmp(name, "meta") && !t->meta) {
			ti->error = "cannot open the metadata device";
			err = dm_get_device(ti, dm_shift_arg(as),
					    dm_table_get_mode(ti->table), &t->meta);
		} else if (!strcasecmp(name, "region_sectors") && !sized) {
			sized = true;
			err = dm_read_arg(counts + 1, as, &args->region_sectors, &ti->error);
		} else {
			ti->error = "unknown option, or one given twice";
			err = -EINVAL;
		}
	}
	if (!err && (left || as->argc)) {
		ti->error = "options come in pairs, and their number first";
		err = -EINVAL;
	}
	if (!err && sized && !t->meta) {
		ti->error = "region_sectors is for a metadata device";
		err = -EINVAL;
	}
	return err;
}

static int track_parse(struct dm_target *ti, unsigned int argc, char **argv,
		       struct track_args *args)
{
	struct track_target *t = ti->private;
	struct dm_arg_set as = { .argc = argc, .argv = argv };
	unsigned long long start;
	unsigned int blocks;
	const char *dev;
	char dummy;
	u64 total;
	int err;

	if (argc < 3) {
		ti->error = "needs a device, an offset and a block size in sectors";
		return -EINVAL;
	}
	dev = dm_shift_arg(&as);
	if (sscanf(dm_shift_arg(&as), "%llu%c", &start, &dummy) != 1 ||
	    start != (sector_t)start) {
		ti->error = "invalid offset";
		return -EINVAL;
	}
	t->start = start;
	if (kstrtouint(dm_shift_arg(&as), 10, &args->block_sectors) ||
	    args->block_sectors < BLOCK_SECTORS_MIN ||
	    args->block_sectors > BLOCK_SECTORS_MAX ||
	    !is_power_of_2(args->block_sectors)) {
		ti->error = "block_sectors must be a power of two from 8 to 2048";
		return -EINVAL;
	}
	args->region_sectors = max(REGION_SECTORS, REGION_BLOCKS_MIN * args->block_sectors);

	err = dm_get_device(ti, dev, dm_table_get_mode(ti->table), &t->dev);
	if (err) {
		ti->error = "cannot open the device";
		return err;
	}
	err = track_parse_options(ti, &as, args);
	if (err)
		return err;
	if (t->meta && t->meta->bdev == t->dev->bdev) {
		ti->error = "the metadata needs a device of its own";
		return -EINVAL;
	}
	blocks = args->region_sectors / args->block_sectors;
	if (!is_power_of_2(args->region_sectors) || blocks < REGION_BLOCKS_MIN ||
	    blocks > REGION_BLOCKS_MAX) {
		ti->error = "region_sectors must be a power of two, from 64 to 131072 blocks";
		return -EINVAL;
	}
	total = DIV_ROUND_UP_ULL(ti->len, args->block_sectors);
	if (total > (u64)max_bitmap_mib << 23 || total / blocks >= INT_MAX) {
		ti->error = "the bitmap is too large: use larger blocks, or raise max_bitmap_mib";
		return -EFBIG;
	}
	return 0;
}

static int track_ctr(struct dm_target *ti, unsigned int argc, char **argv)
{
	struct track_args args;
	int err;

	ti->private = kzalloc(sizeof(struct track_target), GFP_KERNEL);
	if (!ti->private) {
		ti->error = "out of memory";
		return -ENOMEM;
	}
	err = track_parse(ti, argc, argv, &args) ?: track_record_get(ti, &args);
	if (err) {
		track_dtr(ti);
		return err;
	}
	ti->num_flush_bios = 1;
	ti->num_discard_bios = 1;
	ti->num_secure_erase_bios = 1;
	ti->num_write_zeroes_bios = 1;
	ti->per_io_data_size = sizeof(struct track_io);
	return 0;
}

/* The device is suspended: this table's devices are used from now on. */
static int track_preresume(struct dm_target *ti)
{
	struct track_target *t = ti->private;
	struct track_record *r = t->record;
	int err = 0;

	mutex_lock(&r->control);
	/* The table before this one still holds its devices, until this returns. */
	r->owner = t;
	if (ti->len < r->sectors || (ti->len > r->sectors && !t->maps.bits[0]))
		err = -EINVAL;
	else if (ti->len > r->sectors)
		err = track_record_grow(r, &t->maps, ti->len);
	track_maps_free(&t->maps);
	mutex_unlock(&r->control);
	if (err)
		DMERR("%s: cannot take the size of the new table (%d)", r->name, err);
	else if (r->log)
		track_log_start(r->log);
	return err;
}

/* No write is in flight: bring the log to rest, so that the record is exact. */
static void track_postsuspend(struct dm_target *ti)
{
	struct track_target *t = ti->private;
	struct track_record *r = t->record;

	mutex_lock(&r->control);
	track_record_settle(r);
	if (r->log)
		track_log_stop(r->log);
	mutex_unlock(&r->control);
}

static int track_message(struct dm_target *ti, unsigned int argc, char **argv,
			 char *result, unsigned int maxlen)
{
	struct track_target *t = ti->private;
	struct track_record *r = t->record;
	uuid_t name = uuid_null;
	unsigned int sz = 0;
	u64 first, count;
	int err = mutex_lock_killable(&r->control);

	if (err)
		return err;
	if (argc == 1 && !strcasecmp(argv[0], "checkpoint")) {
		err = track_record_checkpoint(r, &first);
		if (!err) {
			DMEMIT("%llu", first);
			err = 1;
		}
	} else if ((argc == 2 || argc == 3) && !strcasecmp(argv[0], "release")) {
		err = kstrtou64(argv[1], 10, &first) ?:
		      (argc == 3 ? uuid_parse(argv[2], &name) : 0) ?:
		      track_record_release(r, first, &name);
	} else if (argc == 1 && !strcasecmp(argv[0], "abort")) {
		err = track_record_abort(r);
	} else if (argc == 3 && !strcasecmp(argv[0], "mark")) {
		err = kstrtou64(argv[1], 10, &first) ?: kstrtou64(argv[2], 10, &count) ?:
		      track_record_mark(r, first, count);
	} else if (argc == 1 && !strcasecmp(argv[0], "mark_all")) {
		err = track_record_mark(r, 0, r->blocks);
	} else if (argc == 1 && !strcasecmp(argv[0], "untrack") && r->log) {
		err = track_log_untrack(r->log);
	} else {
		DMERR("%s: message '%s' is not understood", r->name, argv[0]);
		err = -EINVAL;
	}
	mutex_unlock(&r->control);
	return err;
}

static void track_status(struct dm_target *ti, status_type_t type,
			 unsigned int status_flags, char *result, unsigned int maxlen)
{
	struct track_target *t = ti->private;
	struct track_record *r = t->record;
	struct track_epoch *active;
	unsigned int sz = 0;

	switch (type) {
	case STATUSTYPE_INFO:
		mutex_lock(&r->lock);
		active = track_active(r);
		DMEMIT("%u %llu %llu ", 1U << r->block_shift, r->blocks,
		       (u64)atomic64_read(&active->dirty));
		if (r->frozen)
			DMEMIT("%llu", r->frozen->number);
		else
			DMEMIT("-");
		DMEMIT(" %llu %pUb %s %zu ", active->number, &r->uuid,
		       active->lost ? "lost" : "tracked", track_record_bytes(r));
		if (uuid_is_null(&r->released))
			DMEMIT("-");
		else
			DMEMIT("%pUb", &r->released);
		if (r->log)
			DMEMIT(" %s %llu", track_log_state(r->log),
			       track_log_active_regions(r->log));
		mutex_unlock(&r->lock);
		break;
	case STATUSTYPE_TABLE:
		DMEMIT("%s %llu %u", t->dev->name, (unsigned long long)t->start,
		       1U << r->block_shift);
		if (t->meta)
			DMEMIT(" 4 meta %s region_sectors %u", t->meta->name,
			       track_log_region_sectors(r->log));
		break;
	case STATUSTYPE_IMA:
		DMEMIT_TARGET_NAME_VERSION(ti->type);
		DMEMIT(",device_name=%s,start=%llu;", t->dev->name,
		       (unsigned long long)t->start);
		break;
	}
}

static int track_iterate_devices(struct dm_target *ti,
				 iterate_devices_callout_fn fn, void *data)
{
	struct track_target *t = ti->private;

	return fn(ti, t->dev, t->start, ti->len, data);
}

/*
 * Without prepare_ioctl, so that no command passes that writes behind the
 * target's back (SG_IO). Without DAX, whose stores are not seen, and without
 * zones, whose appends choose their own place.
 */
static struct target_type track_target = {
	.name		 = "track",
	.version	 = { 1, 0, 0 },
	.features	 = DM_TARGET_SINGLETON | DM_TARGET_NOWAIT |
			   DM_TARGET_PASSES_INTEGRITY | DM_TARGET_PASSES_CRYPTO,
	.module		 = THIS_MODULE,
	.ctr		 = track_ctr,
	.dtr		 = track_dtr,
	.map		 = track_map,
	.end_io		 = track_end_io,
	.preresume	 = track_preresume,
	.postsuspend	 = track_postsuspend,
	.message	 = track_message,
	.status		 = track_status,
	.iterate_devices = track_iterate_devices,
};

static int __init dm_track_init(void)
{
	int err = track_proc_init();

	if (err)
		return err;
	err = dm_register_target(&track_target);
	if (err)
		track_proc_exit();
	return err;
}

static void __exit dm_track_exit(void)
{
	dm_unregister_target(&track_target);
	track_proc_exit();
}

module_init(dm_track_init);
module_exit(dm_track_exit);

MODULE_DESCRIPTION(DM_NAME " target that tracks which blocks were written");
MODULE_AUTHOR("The dsync authors");
MODULE_LICENSE("GPL");
