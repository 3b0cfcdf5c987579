/* Block id -> the number of its set of holders: a compact hash table for state/native_table.py.
 *
 * Open addressing with linear probing in 1,024 parts of their own sizes, 20 bytes a slot, between
 * half and three quarters full. A part grows alone, so that no change takes long. Removal shifts
 * back what follows, and leaves nothing behind. Ids are compared whole; the hash that spreads them
 * is seeded, so that nobody can aim at one part. Number 0 is an empty slot.
 *
 * No Python API: one build serves every CPython. The caller holds the interpreter's lock.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef __SIZEOF_INT128__
#error "a 64-bit compiler with __int128 is needed"
#endif

#define PART_BITS 10
#define PARTS (1 << PART_BITS)
#define ID_BYTES 16
#define LEAST_SLOTS 8
#define AHEAD 8

typedef struct {
    uint32_t id[ID_BYTES / 4];
    uint32_t number;
} slot;

typedef struct {
    slot *slots;
    uint32_t size, used;
} part;

typedef struct {
    uint64_t seeds[2];
    uint64_t blocks, slots;
    part parts[PARTS];
} table;

static uint64_t hash_of(const table *t, const void *id) {
    uint64_t low, high;
    memcpy(&low, id, 8);
    memcpy(&high, (const char *)id + 8, 8);
    unsigned __int128 product = (unsigned __int128)(low ^ t->seeds[0]) * (high ^ t->seeds[1]);
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint32_t part_of(uint64_t hash) { return (uint32_t)(hash >> (64 - PART_BITS)); }

static uint32_t home_of(const part *p, uint64_t hash) {
    return (uint32_t)(((hash & 0xffffffffu) * p->size) >> 32);
}

/* The slot that has the id, else the empty one where it would go. The part has an empty slot. */
static slot *slot_of(const part *p, uint64_t hash, const void *id) {
    uint32_t at = home_of(p, hash);
    while (p->slots[at].number && memcmp(p->slots[at].id, id, ID_BYTES) != 0)
        if (++at == p->size) at = 0;
    return &p->slots[at];
}

static int resize(table *t, part *p, uint32_t size) {
    part grown = {calloc(size, sizeof(slot)), size, p->used};
    if (!grown.slots) return -1;
    for (uint32_t at = 0; at < p->size; at++) {
        const slot *from = &p->slots[at];
        if (from->number) *slot_of(&grown, hash_of(t, from->id), from->id) = *from;
    }
    t->slots += (uint64_t)size - p->size;
    free(p->slots);
    *p = grown;
    return 0;
}

static uint32_t number_at(const table *t, const void *id) {
    uint64_t hash = hash_of(t, id);
    const part *p = &t->parts[part_of(hash)];
    return p->size ? slot_of(p, hash, id)->number : 0;
}

static void take_out(table *t, part *p, slot *gone) {
    uint32_t hole = (uint32_t)(gone - p->slots), at = hole;
    for (;;) {
        if (++at == p->size) at = 0;
        if (!p->slots[at].number) break;
        uint32_t home = home_of(p, hash_of(t, p->slots[at].id));
        int is_between = hole <= at ? hole < home && home <= at : hole < home || home <= at;
        if (is_between) continue;
        p->slots[hole] = p->slots[at];
        hole = at;
    }
    p->slots[hole].number = 0;
    p->used--;
    t->blocks--;
    if (p->size > 4 * LEAST_SLOTS && p->used < p->size / 4)
        resize(t, p, p->used * 2); /* without memory it stays as large as it is */
}

/* 1 for a change, 0 for none, -1 without memory. */
static int set_number(table *t, const void *id, uint32_t number) {
    uint64_t hash = hash_of(t, id);
    part *p = &t->parts[part_of(hash)];
    if (!p->size && (!number || resize(t, p, LEAST_SLOTS))) return number ? -1 : 0;
    slot *found = slot_of(p, hash, id);
    if (found->number == number) return 0;
    if (!number) {
        take_out(t, p, found);
        return 1;
    }
    if (!found->number) {
        if ((uint64_t)(p->used + 1) * 4 > (uint64_t)p->size * 3) {
            if (resize(t, p, p->size + p->size / 2)) return -1;
            found = slot_of(p, hash, id);
        }
        memcpy(found->id, id, ID_BYTES);
        p->used++;
        t->blocks++;
    }
    found->number = number;
    return 1;
}

/* Begin to load what the id that comes some places later will need. */
static void look_ahead(const table *t, const char *ids, int64_t at, int64_t count) {
    if (at + AHEAD >= count) return;
    uint64_t hash = hash_of(t, ids + (at + AHEAD) * ID_BYTES);
    const part *p = &t->parts[part_of(hash)];
    if (p->size) __builtin_prefetch(&p->slots[home_of(p, hash)]);
}

table *wr_table_new(uint64_t first_seed, uint64_t second_seed) {
    table *t = calloc(1, sizeof(table));
    if (t) t->seeds[0] = first_seed, t->seeds[1] = second_seed;
    return t;
}

void wr_table_free(table *t) {
    for (int at = 0; t && at < PARTS; at++) free(t->parts[at].slots);
    free(t);
}

int64_t wr_table_blocks(const table *t) { return (int64_t)t->blocks; }

int64_t wr_table_bytes(const table *t) {
    return (int64_t)(sizeof(table) + t->slots * sizeof(slot));
}

void wr_table_get(const table *t, const char *ids, int64_t count, uint32_t *numbers) {
    for (int64_t at = 0; at < count; at++) {
        look_ahead(t, ids, at, count);
        numbers[at] = number_at(t, ids + at * ID_BYTES);
    }
}

/* Change the number of the leading ids that have the number `from`. Returns how many there were,
 * -1 without memory. An id that comes again has `to` by then, and ends it. */
int64_t wr_table_replace(table *t, const char *ids, int64_t count, uint32_t from, uint32_t to) {
    for (int64_t at = 0; at < count; at++) {
        look_ahead(t, ids, at, count);
        const char *id = ids + at * ID_BYTES;
        if (number_at(t, id) != from) return at;
        if (set_number(t, id, to) < 0) return -1;
    }
    return count;
}

/* Give each id its number, 0 to take it out. Returns how many changed, -1 without memory. */
int64_t wr_table_put(table *t, const char *ids, int64_t count, const uint32_t *numbers) {
    int64_t changed = 0;
    for (int64_t at = 0; at < count; at++) {
        look_ahead(t, ids, at, count);
        int done = set_number(t, ids + at * ID_BYTES, numbers[at]);
        if (done < 0) return -1;
        changed += done;
    }
    return changed;
}

/* Note where each run of equal numbers ends, counted on from `before`, and which it is; at most
 * `most` of them. With `until_unknown` the first id that is not in the table is the last one looked at. */
int64_t wr_table_walk(const table *t, const char *ids, int64_t count, int64_t before,
                      int until_unknown, int64_t most, int64_t *ends, uint32_t *numbers) {
    int64_t pieces = 0;
    for (int64_t at = 0; at < count; at++) {
        look_ahead(t, ids, at, count);
        uint32_t number = number_at(t, ids + at * ID_BYTES);
        if (!pieces || numbers[pieces - 1] != number) {
            if (pieces == most) return pieces;
            numbers[pieces++] = number;
        }
        ends[pieces - 1] = before + at + 1;
        if (until_unknown && !number) break;
    }
    return pieces;
}
