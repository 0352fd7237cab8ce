// SPDX-License-Identifier: GPL-2.0
/*
 * /proc/track/NAME lists the blocks that changed, one number a line, and is
 * cleared by writing anything to it. /proc/track/NAME.frozen is the record that
 * a checkpoint froze, for programs: a header and the bitmap.
 *
 * proc_remove() waits for calls under way and closes what is open, so a record
 * lives as long as its files are in use. Calls take record->lock only, or
 * record->control where they may wait; whoever removes holds neither.
 */
#include "dm-track.h"

#include <linux/seq_file.h>
#include <linux/uaccess.h>

/**
 * struct track_header - stands before the bitmap in /proc/track/NAME.frozen
 * @magic: "dmtrack1"
 * @epoch: number of the frozen epoch
 * @blocks: bits in the bitmap, which is padded to eight bytes
 * @dirty: bits that are set
 * @uuid: the record's
 * @block_sectors: size of a block
 * @flags: bit 0: the epoch does not hold every change since the one before it
 * @reserved: zero
 */
struct track_header {
	char magic[8];
	__le64 epoch;
	__le64 blocks;
	__le64 dirty;
	__u8 uuid[16];
	__le32 block_sectors;
	__le32 flags;
	__le64 reserved;
};

static struct proc_dir_entry *track_dir;

/* The next block that is dirty, in the active or the frozen epoch. */
static u64 track_proc_dirty(struct track_record *r, u64 block)
{
	unsigned long *active = track_active(r)->bits;
	unsigned long *frozen = r->frozen ? r->frozen->bits : active;
	unsigned long mask = BITMAP_FIRST_WORD_MASK(block), bits;
	u64 words = BITS_TO_LONGS(r->blocks), word;

	if (block >= r->blocks)
		return U64_MAX;
	for (word = block / BITS_PER_LONG; word < words; word++, mask = ~0UL) {
		bits = (READ_ONCE(active[word]) | READ_ONCE(frozen[word])) & mask;
		if (bits)
			return word * BITS_PER_LONG + __ffs(bits);
		if (!(word % SZ_64K))
			cond_resched();
	}
	return U64_MAX;
}

static void *track_seq_at(struct track_record *r, loff_t *pos)
{
	u64 block = track_proc_dirty(r, *pos);

	if (block == U64_MAX)
		return NULL;
	*pos = block;
	return pos;
}

static void *track_seq_start(struct seq_file *m, loff_t *pos)
{
	struct track_record *r = m->private;

	mutex_lock(&r->lock);
	return track_seq_at(r, pos);
}

static void *track_seq_next(struct seq_file *m, void *v, loff_t *pos)
{
	++*pos;
	v = track_seq_at(m->private, pos);
	return v;
}

static void track_seq_stop(struct seq_file *m, void *v)
{
	struct track_record *r = m->private;

	mutex_unlock(&r->lock);
}

static int track_seq_show(struct seq_file *m, void *v)
{
	seq_put_decimal_ull(m, "", *(loff_t *)v);
	seq_putc(m, '\n');
	return 0;
}

static const struct seq_operations track_seq_ops = {
	.start	= track_seq_start,
	.next	= track_seq_next,
	.stop	= track_seq_stop,
	.show	= track_seq_show,
};

static int track_proc_open(struct inode *inode, struct file *file)
{
	int err = seq_open(file, &track_seq_ops);

	if (!err)
		((struct seq_file *)file->private_data)->private = pde_data(inode);
	return err;
}

static ssize_t track_proc_write(struct file *file, const char __user *from,
				size_t size, loff_t *pos)
{
	struct track_record *r = pde_data(file_inode(file));
	int err = mutex_lock_killable(&r->control);

	if (err)
		return err;
	err = r->owner ? track_record_clear(r) : -ENODEV;
	mutex_unlock(&r->control);
	return err ?: size;
}

static const struct proc_ops track_proc_ops = {
	.proc_open	= track_proc_open,
	.proc_read	= seq_read,
	.proc_write	= track_proc_write,
	.proc_lseek	= seq_lseek,
	.proc_release	= seq_release,
};

static struct track_epoch *track_proc_epoch(struct track_record *r)
{
	lockdep_assert_held(&r->lock);
	return r->frozen && r->frozen->ready ? r->frozen : NULL;
}

/* What is read through one descriptor is one epoch's: it keeps the number. */
static int track_frozen_open(struct inode *inode, struct file *file)
{
	struct track_record *r = pde_data(inode);
	struct track_epoch *e;

	mutex_lock(&r->lock);
	e = track_proc_epoch(r);
	if (e)
		file->private_data = (void *)e->number;
	mutex_unlock(&r->lock);
	return e ? 0 : -ENODATA;
}

static ssize_t track_frozen_read(struct file *file, char __user *to,
				 size_t size, loff_t *pos)
{
	struct track_record *r = pde_data(file_inode(file));
	struct track_header header = { .magic = "dmtrack1" };
	struct track_epoch *e;
	ssize_t done = 0, n;
	loff_t at;

	mutex_lock(&r->lock);
	e = track_proc_epoch(r);
	if (!e || e->number != (unsigned long)file->private_data) {
		mutex_unlock(&r->lock);
		return -ESTALE;
	}
	header.epoch = cpu_to_le64(e->number);
	header.blocks = cpu_to_le64(e->blocks);
	header.dirty = cpu_to_le64(atomic64_read(&e->dirty));
	export_uuid(header.uuid, &r->uuid);
	header.block_sectors = cpu_to_le32(1U << r->block_shift);
	header.flags = cpu_to_le32(e->lost);

	if (*pos < sizeof(header))
		done = simple_read_from_buffer(to, size, pos, &header, sizeof(header));
	if (done >= 0 && done < size && *pos >= sizeof(header)) {
		at = *pos - sizeof(header);
		n = simple_read_from_buffer(to + done, size - done, &at, e->bits,
					    BITS_TO_LONGS(e->blocks) * sizeof(long));
		if (n > 0) {
			*pos = at + sizeof(header);
			done += n;
		} else if (!done) {
			done = n;
		}
	}
	mutex_unlock(&r->lock);
	return done;
}

static const struct proc_ops track_frozen_ops = {
	.proc_open	= track_frozen_open,
	.proc_read	= track_frozen_read,
	.proc_lseek	= default_llseek,
};

/**
 * track_proc_add - show a record
 * @r: the record; no other has its name
 *
 * Return: 0 or -ENOMEM.
 */
int track_proc_add(struct track_record *r)
{
	char name[DM_NAME_LEN + sizeof(".frozen")];

	snprintf(name, sizeof(name), "%s.frozen", r->name);
	r->proc = proc_create_data(r->name, 0600, track_dir, &track_proc_ops, r);
	r->proc_frozen = proc_create_data(name, 0400, track_dir, &track_frozen_ops, r);
	if (r->proc && r->proc_frozen)
		return 0;
	track_proc_remove(r);
	return -ENOMEM;
}

void track_proc_remove(struct track_record *r)
{
	proc_remove(r->proc_frozen);
	proc_remove(r->proc);
}

int track_proc_init(void)
{
	track_dir = proc_mkdir("track", NULL);
	return track_dir ? 0 : -ENOMEM;
}

void track_proc_exit(void)
{
	proc_remove(track_dir);
}
