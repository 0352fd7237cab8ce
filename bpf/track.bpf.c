// SPDX-License-Identifier: GPL-2.0
/*
 * Records which blocks of one disk are written.
 *
 * A record is an array of words: one bit a block, padded to groups of 64 words, and behind them one summary bit for each
 * group. User space maps it and reads it as it is. The record in use stands in `slot`: replacing it begins the next epoch,
 * and the kernel returns from that only when no program works with the old one any more.
 *
 * A write is known by its bio from the moment it is queued until it completes, so that whoever replaces the record can
 * mark in the new one what was in flight meanwhile. Two tracepoints tell of the end: of a request, where the disk takes
 * requests, and of a bio where it doesn't. Neither tells of both.
 *
 * Built into track.bpf.o by `make bpf`. The layouts below name only what is used: they are matched by name with those of
 * the running kernel when the object is loaded.
 */

typedef unsigned int u32;
typedef unsigned long long u64;

#define SEC(name) __attribute__((section(name), used))
#define __uint(name, value) int(*name)[value]
#define __type(name, value) typeof(value) *name
#define __array(name, value) typeof(value) *name[]
/* Whether the running kernel has this field. */
#define KNOWS(field) __builtin_preserve_field_info(field, 2)
#define inline inline __attribute__((always_inline))

enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_ARRAY_OF_MAPS = 12,
	BPF_F_MMAPABLE = 1 << 10,
	BPF_F_INNER_MAP = 1 << 12,
};

static void *(*const bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*const bpf_map_update_elem)(void *map, const void *key, const void *value, u64 flags) = (void *)2;
static long (*const bpf_map_delete_elem)(void *map, const void *key) = (void *)3;
static long (*const bpf_loop)(u32 times, void *step, void *context, u64 flags) = (void *)181;

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct block_device;

struct gendisk {
	struct block_device *part0;
	u64 diskseq;
};

struct block_device {
	u64 bd_nr_sectors;
	struct gendisk *bd_disk;
	u32 bd_dev;
};

struct bvec_iter {
	u64 bi_sector;
	u32 bi_size;
};

struct bio {
	struct bio *bi_next;
	struct block_device *bi_bdev;
	u32 bi_opf;
	struct bvec_iter bi_iter;
	void *bi_private;
};

struct request_queue {
	struct gendisk *disk;
};

struct request {
	struct request_queue *q;
	u32 cmd_flags;
	struct bio *bio;
};
#pragma clang attribute pop

/* Set by the loader. The number that the kernel gave this disk and will give no other. */
volatile const u64 diskseq;
/* What is followed of the disk, in sectors of 512 bytes: all of it, or one partition. */
volatile const u64 first_sector;
volatile const u64 sectors;
/* A block has 2^block_shift sectors. */
volatile const u64 block_shift;
/* Words of a record before its summary. */
volatile const u64 leaf_words;

struct record {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE | BPF_F_INNER_MAP);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u64);
};

/* The record in use. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, u32);
	__array(values, struct record);
} slot SEC(".maps");

/* First and last block of a write; none if last is below first. */
struct blocks {
	u64 first;
	u64 last;
};

/* The writes in flight. Allocated ahead: a write never waits for memory. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 17);
	__type(key, u64);
	__type(value, struct blocks);
} flight SEC(".maps");

enum {
	/* Writes that found no place in `flight` or in the record. */
	DROPPED,
	/* Writes that completed without having been in `flight`: they began before the tracking, or were dropped. */
	STRAY,
	/* Times that the disk was made smaller: what was cut off is gone, also if it is as large again. */
	SHRUNK,
	/* Commands of a driver's own with data for the disk, which a program has sent past the block layer. */
	PASSED,
	COUNTS,
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, COUNTS);
	__type(key, u32);
	__type(value, u64);
} counts SEC(".maps");

/* What user space knows of the tracker, as JSON padded with zeroes. */
struct notes {
	char text[4096];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct notes);
} notes SEC(".maps");

static inline void count(u32 what)
{
	u64 *value = bpf_map_lookup_elem(&counts, &what);

	if (value)
		__sync_fetch_and_add(value, 1);
}

static inline void set(void *record, u32 word, u64 bits)
{
	volatile u64 *value = bpf_map_lookup_elem(record, &word);

	if (!value)
		count(DROPPED);
	else if ((*value & bits) != bits)
		__sync_fetch_and_or(value, bits);
}

/* The summary first: a leaf that is set can always be found through it. */
static inline void mark_word(void *record, u64 word, u64 bits)
{
	u64 group = word >> 6;

	set(record, leaf_words + (group >> 6), 1ULL << (group & 63));
	set(record, word, bits);
}

struct range {
	void *record;
	struct blocks blocks;
};

static long mark_step(u32 step, struct range *range)
{
	u64 word = (range->blocks.first >> 6) + step, bits = ~0ULL;

	if (step == 0)
		bits <<= range->blocks.first & 63;
	if (word == range->blocks.last >> 6)
		bits &= ~0ULL >> (63 - (range->blocks.last & 63));
	mark_word(range->record, word, bits);
	return 0;
}

static inline void mark(struct blocks blocks)
{
	u32 zero = 0;
	struct range range = { .record = bpf_map_lookup_elem(&slot, &zero), .blocks = blocks };
	u64 words = (blocks.last >> 6) - (blocks.first >> 6) + 1;

	if (!range.record)
		count(DROPPED);
	else if (words == 1)
		mark_step(0, &range);
	else if (bpf_loop(words, mark_step, &range, 0) != (long)words)
		count(DROPPED);
}

static inline int changes_data(struct bio *bio)
{
	u32 operation = bio->bi_opf & 0xff;

	/* Odd ones do, but commands of a driver's own (from 34 on) are not to be understood. */
	return (operation & 1) && operation < 34;
}

static inline int is_ours(struct bio *bio)
{
	return bio->bi_bdev->bd_disk->diskseq == diskseq;
}

static inline void resized(struct gendisk *disk, u64 now)
{
	if (disk->diskseq == diskseq && now < first_sector + sectors)
		count(SHRUNK);
}

static inline void enter(u64 bio, struct blocks *blocks)
{
	if (bpf_map_update_elem(&flight, &bio, blocks, 0))
		count(DROPPED);
}

/* A partition's bio has the whole disk's sectors by now. */
static inline void record(struct bio *bio)
{
	struct blocks blocks = { .first = 1, .last = 0 };
	u64 begin, end;

	if (!changes_data(bio) || !bio->bi_iter.bi_size || !is_ours(bio))
		return;
	begin = bio->bi_iter.bi_sector;
	end = begin + (bio->bi_iter.bi_size >> 9);
	begin = begin > first_sector ? begin - first_sector : 0;
	end = end > first_sector ? end - first_sector : 0;
	if (end > sectors)
		end = sectors;
	if (begin < end) {
		blocks.first = begin >> block_shift;
		blocks.last = (end - 1) >> block_shift;
	}
	/* Those beside what is followed, too: whatever completes unknown is a stray. */
	enter((u64)bio, &blocks);
	if (begin < end)
		mark(blocks);
}

SEC("tp_btf/block_bio_queue")
int queue(u64 *ctx)
{
	struct bio *bio = (struct bio *)ctx[0];
	struct gendisk *disk = bio->bi_bdev->bd_disk;

	/* Where no function tells of it. */
	if (KNOWS(disk->part0->bd_nr_sectors))
		resized(disk, disk->part0->bd_nr_sectors);
	record(bio);
	return 0;
}

/* Who sends a queued bio on to another disk does not queue it again, and says so here. */
SEC("tp_btf/block_bio_remap")
int remap(u64 *ctx)
{
	struct bio *bio = (struct bio *)ctx[0];
	u32 from = ctx[1];
	struct block_device *device = bio->bi_bdev;

	/* Sent on to a partition: its sectors count from the partition's begin until it is remapped once more. */
	if (device != device->bd_disk->part0 && device->bd_dev != from)
		return 0;
	record(bio);
	return 0;
}

/*
 * A part of a bio is not queued on its own, and may land after the rest: it is in flight as the whole is. It is marked, too: whoever looks at what is in
 * flight may be past the part's place in the table, and see the whole no more.
 */
SEC("tp_btf/block_split")
int split(u64 *ctx)
{
	struct bio *part = (struct bio *)ctx[0];
	u64 whole = (u64)part->bi_private;
	struct blocks *found = bpf_map_lookup_elem(&flight, &whole);

	if (found) {
		struct blocks blocks = *found;

		enter((u64)part, &blocks);
		if (blocks.first <= blocks.last)
			mark(blocks);
	}
	return 0;
}

/* By now the bio may name another disk than when it was queued. */
static inline void leave(struct bio *bio, u32 size)
{
	u64 key = (u64)bio;
	struct blocks *found;

	if (!bpf_map_delete_elem(&flight, &key) || !size || !is_ours(bio))
		return;
	/* What encrypts on the way writes a bio of its own in place of the one that was queued. One of a chain leads to the next, which begins elsewhere. */
	key = (u64)bio->bi_private;
	found = bpf_map_lookup_elem(&flight, &key);
	if (!found || found->first != (bio->bi_iter.bi_sector - first_sector) >> block_shift)
		count(STRAY);
}

SEC("tp_btf/block_bio_complete")
int bio_complete(u64 *ctx)
{
	struct bio *bio = (struct bio *)ctx[1];

	if (changes_data(bio))
		leave(bio, bio->bi_iter.bi_size);
	return 0;
}

/*
 * More than a request holds of bios of a page. What it holds in excess is taken to be in flight until its bio is used again. The verifier follows no
 * more than 8192 jumps.
 */
#define MOST_BIOS 768

/* REQ_OP_DRV_OUT: nothing else tells what it writes, or where. */
#define COMMAND_OUT 35

SEC("tp_btf/block_rq_complete")
int rq_complete(u64 *ctx)
{
	struct request *request = (struct request *)ctx[0];
	struct bio *bio = request->bio;
	u32 left = ctx[2];

	/* Its bios name no disk. */
	if ((request->cmd_flags & 0xff) == COMMAND_OUT && request->q->disk->diskseq == diskseq)
		count(PASSED);
	if (!bio || !changes_data(bio))
		return 0;
	for (int i = 0; i < MOST_BIOS && bio; i++) {
		u32 size = bio->bi_iter.bi_size;

		/* The rest of it comes later. */
		if (size > left)
			break;
		leave(bio, size);
		left -= size;
		if (!left)
			break;
		bio = bio->bi_next;
	}
	return 0;
}

/* The second calls the first, which the compiler may have copied into it. */
SEC("fentry/set_capacity")
int capacity(u64 *ctx)
{
	resized((struct gendisk *)ctx[0], ctx[1]);
	return 0;
}

SEC("fentry/set_capacity_and_notify")
int new_capacity(u64 *ctx)
{
	resized((struct gendisk *)ctx[0], ctx[1]);
	return 0;
}

SEC("fentry/bdev_resize_partition")
int partition(u64 *ctx)
{
	/* It begins where it did. */
	if (ctx[2] == first_sector)
		resized((struct gendisk *)ctx[0], ctx[2] + ctx[3]);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
