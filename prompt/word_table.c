/* Words -> their packed ids, for prompt/native_word.py: a text is cut into words and looked up here.
 *
 * A space behind other text than white space begins a word. Where white space stands before a space,
 * as in indented code, the word is cut into the pieces of a pre-tokenizer pattern, as it reads for
 * ASCII (prompt/word.py); without a pattern it stays whole.
 *
 * Words lie one after another in one block of memory: length, number of ids, text, ids. A table of
 * slots finds them: open addressing, at most half full. The hash is seeded, so that nobody can make
 * words meet in one place. When there are too many words all are forgotten.
 *
 * No Python API: one build serves every CPython. The caller holds the interpreter's lock.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef __SIZEOF_INT128__
#error "a 64-bit compiler with __int128 is needed"
#endif

#define LEAST_SLOTS 1024
#define ID_BYTES 4
#define HEAD_BYTES 2
#define MOST_WORD_BYTES 48

enum { NO_PATTERN, GPT2, QWEN2, LLAMA3, O200K };
enum { LETTER = 1, DIGIT = 2, SPACE = 4, LINE_END = 8, UPPER = 16 };

typedef struct {
    uint32_t hash, at; /* place in the text block plus one; 0: an empty slot */
} slot;

typedef struct {
    uint64_t seeds[2];
    slot *slots;
    unsigned char *block;
    uint64_t size, words, most_words, used, room;
} table;

typedef struct {
    int64_t begin, end;
} span;

static unsigned char kinds[256];

static void name_kinds(void) {
    for (int c = 'a'; c <= 'z'; c++) kinds[c] = LETTER;
    for (int c = 'A'; c <= 'Z'; c++) kinds[c] = LETTER | UPPER;
    for (int c = '0'; c <= '9'; c++) kinds[c] = DIGIT;
    for (int c = '\t'; c <= '\r'; c++) kinds[c] = SPACE;
    kinds['\r'] = kinds['\n'] = SPACE | LINE_END;
    kinds[' '] = SPACE;
}

static uint64_t mixed(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint32_t hash_of(const table *t, const unsigned char *word, int64_t length) {
    uint64_t hash = t->seeds[0] ^ (uint64_t)length, part = 0;
    for (; length > 8; length -= 8, word += 8) {
        memcpy(&part, word, 8);
        hash = mixed(hash ^ part, t->seeds[1]);
    }
    part = 0;
    memcpy(&part, word, (size_t)length);
    return (uint32_t)mixed(hash ^ part, t->seeds[1]);
}

/* The slot of the word, else the empty one where it would go. */
static slot *slot_of(const table *t, uint32_t hash, const unsigned char *word, int64_t length) {
    uint64_t at = hash & (t->size - 1);
    for (;; at = (at + 1) & (t->size - 1)) {
        slot *s = &t->slots[at];
        if (!s->at) return s;
        const unsigned char *known = t->block + s->at - 1;
        if (s->hash == hash && known[0] == length && !memcmp(known + HEAD_BYTES, word, (size_t)length))
            return s;
    }
}

static int64_t while_kind(const unsigned char *text, int64_t at, int64_t end, int kind) {
    while (at < end && kinds[text[at]] & kind) at++;
    return at;
}

static int64_t while_sign(const unsigned char *text, int64_t at, int64_t end) {
    while (at < end && !(kinds[text[at]] & (LETTER | DIGIT | SPACE))) at++;
    return at;
}

/* The end of 's, 't, 're, 've, 'm, 'll or 'd, else where it began. */
static int64_t contraction(const unsigned char *text, int64_t at, int64_t end, unsigned char fold) {
    if (at + 1 >= end || text[at] != '\'') return at;
    unsigned char one = text[at + 1] | fold, two = at + 2 < end ? text[at + 2] | fold : 0;
    if (one == 's' || one == 't' || one == 'm' || one == 'd') return at + 2;
    if (((one == 'r' || one == 'v') && two == 'e') || (one == 'l' && two == 'l')) return at + 3;
    return at;
}

/* Words: [^\r\n\p{L}\p{N}]?\p{L}+ and what the patterns make of it; where there is none, at. */
static int64_t letters(const unsigned char *text, int64_t at, int64_t end, int pattern) {
    int64_t first = at;
    if (!(kinds[text[at]] & LETTER)) {
        int is_prefix = pattern == GPT2 ? text[at] == ' ' : !(kinds[text[at]] & (DIGIT | LINE_END));
        if (is_prefix) first++;
    }
    if (first >= end || !(kinds[text[first]] & LETTER)) return at;
    if (pattern != O200K) return while_kind(text, first, end, LETTER);
    first = while_kind(text, first, end, UPPER);
    while (first < end && (kinds[text[first]] & (LETTER | UPPER)) == LETTER) first++;
    return contraction(text, first, end, 0x20);
}

static int64_t digits(const unsigned char *text, int64_t at, int64_t end, int pattern) {
    if (pattern == GPT2) {
        int64_t first = at + (text[at] == ' '), last = while_kind(text, first, end, DIGIT);
        return last > first ? last : at;
    }
    int64_t most = at + (pattern == QWEN2 ? 1 : 3);
    return while_kind(text, at, most < end ? most : end, DIGIT);
}

static int64_t signs(const unsigned char *text, int64_t at, int64_t end, int pattern) {
    int64_t first = at + (text[at] == ' '), last = while_sign(text, first, end);
    if (last == first) return at;
    if (pattern == GPT2) return last;
    while (last < end && (kinds[text[last]] & LINE_END || (pattern == O200K && text[last] == '/'))) last++;
    return last;
}

/* A run of white space up to its last line end, else without its last character, if more follows. */
static int64_t blanks(const unsigned char *text, int64_t at, int64_t end, int pattern) {
    int64_t last = while_kind(text, at, end, SPACE);
    if (pattern != GPT2)
        for (int64_t line = last; line > at; line--)
            if (kinds[text[line - 1]] & LINE_END) return line;
    return last == end || last == at + 1 ? last : last - 1;
}

static int64_t piece_end(const unsigned char *text, int64_t at, int64_t end, int pattern) {
    int64_t found = at;
    if (pattern != O200K) found = contraction(text, at, end, pattern == GPT2 ? 0 : 0x20);
    if (found == at) found = letters(text, at, end, pattern);
    if (found == at) found = digits(text, at, end, pattern);
    if (found == at) found = signs(text, at, end, pattern);
    return found == at ? blanks(text, at, end, pattern) : found;
}

/* The end of the word that begins at a place; *is_wide: a space in it stands behind white space. */
static int64_t word_end(const unsigned char *text, int64_t at, int64_t end, int *is_wide) {
    *is_wide = 0;
    for (int64_t from = at + 1; from < end; from++) {
        const unsigned char *space = memchr(text + from, ' ', (size_t)(end - from));
        if (!space) return end;
        from = space - text;
        if (!(kinds[text[from - 1]] & SPACE)) return from;
        *is_wide = 1;
    }
    return end;
}

static int grow(table *t) {
    table grown = *t;
    grown.size = t->size * 2;
    grown.slots = calloc(grown.size, sizeof(slot));
    if (!grown.slots) return -1;
    for (uint64_t from = 0; from < t->size; from++) {
        slot s = t->slots[from];
        if (!s.at) continue;
        uint64_t at = s.hash & (grown.size - 1);
        while (grown.slots[at].at) at = (at + 1) & (grown.size - 1);
        grown.slots[at] = s;
    }
    free(t->slots);
    *t = grown;
    return 0;
}

void *wr_words_new(uint64_t seed, uint64_t other, int64_t most_words) {
    if (!kinds['a']) name_kinds();
    table *t = calloc(1, sizeof(table));
    if (!t) return NULL;
    t->seeds[0] = seed;
    t->seeds[1] = other;
    t->most_words = (uint64_t)most_words;
    t->size = LEAST_SLOTS;
    t->slots = calloc(t->size, sizeof(slot));
    if (t->slots) return t;
    free(t);
    return NULL;
}

void wr_words_free(table *t) {
    free(t->slots);
    free(t->block);
    free(t);
}

int64_t wr_words_count(const table *t) { return (int64_t)t->words; }

/* Remember the ids of a word. 1: done; 0: it is too long; -1: no memory for it. */
int64_t wr_words_put(table *t, const unsigned char *word, int64_t length, const void *ids, int64_t count) {
    if (length <= 0 || length > MOST_WORD_BYTES || count > length) return 0;
    if (t->words >= t->most_words) {
        memset(t->slots, 0, t->size * sizeof(slot));
        t->words = t->used = 0;
    }
    if (2 * (t->words + 1) > t->size && grow(t)) return -1;
    uint64_t more = HEAD_BYTES + (uint64_t)length + (uint64_t)count * ID_BYTES;
    if (t->used + more > t->room) {
        uint64_t room = 2 * (t->room + more);
        unsigned char *block = realloc(t->block, room);
        if (!block) return -1;
        t->block = block;
        t->room = room;
    }
    uint32_t hash = hash_of(t, word, length);
    slot *s = slot_of(t, hash, word, length);
    if (s->at) return 1;
    unsigned char *place = t->block + t->used;
    place[0] = (unsigned char)length;
    place[1] = (unsigned char)count;
    memcpy(place + HEAD_BYTES, word, (size_t)length);
    memcpy(place + HEAD_BYTES + length, ids, (size_t)count * ID_BYTES);
    *s = (slot){hash, (uint32_t)(t->used + 1)};
    t->used += more;
    t->words++;
    return 1;
}

/* Write the ids of the words of a text from where->begin on, and return how many there are. Ends at
 * the end of the text, where both places of *where are its length, or at a word that is not known:
 * *where is its span. */
int64_t wr_words_get(const table *t, const unsigned char *text, int64_t length, int pattern, span *where, unsigned char *ids) {
    int64_t at = where->begin, written = 0;
    while (at < length) {
        int is_wide;
        int64_t word = word_end(text, at, length, &is_wide);
        while (at < word) {
            int64_t end = is_wide && pattern ? piece_end(text, at, word, pattern) : word;
            const slot *s = NULL;
            if (end - at <= MOST_WORD_BYTES) s = slot_of(t, hash_of(t, text + at, end - at), text + at, end - at);
            if (!s || !s->at) {
                *where = (span){at, end};
                return written;
            }
            const unsigned char *known = t->block + s->at - 1;
            memcpy(ids + written * ID_BYTES, known + HEAD_BYTES + known[0], (size_t)known[1] * ID_BYTES);
            written += known[1];
            at = end;
        }
    }
    *where = (span){length, length};
    return written;
}
