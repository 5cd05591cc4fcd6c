/* Decode groups of numbers of one byte: a look-up finds up to eight, zero runs included. */
#include "tables.h"

enum {
    AT_ONCE = 8,          /* Bytes of an entry. */
    GLANCES = 5,          /* Look-ups of a turn: one load has their bits. */
    MOST_SKIPPED = 255,   /* The longest zero run before the bytes of an entry. */
    GLANCED = 1 << 13,    /* Minimal number of items that repays the making of the tables. */
    MOST_UNFOUND = 1 << GLANCE >> 4,
};

/* Fill the tables from one of the kind PAIR with GLANCE bits, with at most `most_items` items in an entry. Return whether
 * most entries are resolved. */
static bool fill_glances(const uint64_t *restrict pairs, int64_t most_items, struct glances *restrict glances) {
    uint64_t taken[1 << GLANCE], found[1 << GLANCE], skipped[1 << GLANCE], *bytes = glances->bytes;
    for (uint64_t index = 0; index < 1 << GLANCE; index++) {
        uint64_t entry = pairs[index], step = entry >> 8 & 0xFFFF, long_run = 0 - (uint64_t)(step > AT_ONCE);
        uint64_t fits = 0 - (uint64_t)(!(entry & UNRESOLVED) & (step <= MOST_SKIPPED));
        skipped[index] = (step - 1) & long_run & fits;
        found[index] = (step - skipped[index]) & fits;
        taken[index] = entry & 255 & fits;
        bytes[index] = (entry >> 32 & 255 & fits) << (8 * (found[index] - 1) & 63);
    }
    /* Loops without branches, which the compiler vectorises; an item that does not fit is tried again. */
    for (int64_t item = 1; item < most_items; item++)
        for (uint64_t index = 0; index < 1 << GLANCE; index++) {
            uint64_t entry = pairs[index >> taken[index]], bits = entry & 255, step = entry >> 8 & 0xFFFF;
            uint64_t fits = 0 - (uint64_t)((bits <= GLANCE - taken[index]) & (step <= AT_ONCE - found[index]));
            bytes[index] |= (entry >> 32 & 255 & fits) << (8 * (found[index] + step - 1) & 63);
            found[index] += step & fits;
            taken[index] += bits & fits;
        }
    uint64_t unfound = 0, furthest = 1, longest_skip = 0;
    for (uint64_t index = 0; index < 1 << GLANCE; index++) {
        uint64_t whole = skipped[index] + found[index], unresolved = !found[index];
        glances->moves[index] = (uint32_t)(unresolved * UNRESOLVED | taken[index] | skipped[index] << 8 | whole << 16);
        unfound += unresolved;
        furthest = whole > furthest ? whole : furthest;
        longest_skip |= skipped[index];
    }
    glances->furthest = (int64_t)furthest;
    glances->skips = longest_skip > 0;
    return unfound <= MOST_UNFOUND;
}

/* Take turns of some streams until one is close to its last element or the last bit, or an entry is not resolved. Return
 * whether that is so. */
INLINE bool take_glances(
    const uint8_t *payload, struct cursor *cursors, int streams, int64_t limit, const struct glances *glances, bool skips,
    uint8_t *coded) {
    const int64_t last = limit - GLANCES * GLANCE, slack = GLANCES * glances->furthest + AT_ONCE;
    uint64_t positions[STREAMS], words[STREAMS];
    uint8_t *places[STREAMS], *stops[STREAMS];
    bool resolved = true;
    UNROLLED
    for (int i = 0; i < streams; i++) {
        if (cursors[i].at > cursors[i].end - slack)
            return false;
        positions[i] = (uint64_t)cursors[i].position;
        places[i] = coded + cursors[i].at;
        stops[i] = coded + cursors[i].end - slack;
    }
    while (resolved) {
        bool ready = true;
        UNROLLED
        for (int i = 0; i < streams; i++)
            ready &= ((int64_t)positions[i] <= last) & (places[i] <= stops[i]);
        if (!ready)
            break;
        UNROLLED
        for (int i = 0; i < streams; i++)
            words[i] = next_bits(payload, positions[i]);
        uint64_t last_moves = 0;
        _Pragma("GCC unroll 5")
        for (int glance = 0; glance < GLANCES; glance++) {
            /* One stream after the other: their tables and bits stay in registers. */
            UNROLLED
            for (int i = 0; i < streams; i++) {
                uint64_t index = words[i] & ((1 << GLANCE) - 1), moves = glances->moves[index];
                store_word(places[i] + (skips ? moves >> 8 & 255 : 0), glances->bytes[index]);
                places[i] += moves >> 16;
                words[i] >>= moves & 63;
                if (glance == GLANCES - 1)
                    last_moves |= moves;
            }
        }
        /* A stream stays at an entry that is not resolved. */
        resolved = !(last_moves & UNRESOLVED);
        UNROLLED
        for (int i = 0; i < streams; i++)
            positions[i] += (uint64_t)__builtin_clzll(words[i]);
    }
    UNROLLED
    for (int i = 0; i < streams; i++) {
        cursors[i].position = (int64_t)positions[i];
        cursors[i].at = places[i] - coded;
    }
    return !resolved;
}

/* Functions of their own, so that the compiler keeps streams in registers. */
#define GLANCES_OF(name, streams, skips) \
    static __attribute__((noinline)) bool take_glances_##name( \
        const uint8_t *payload, struct cursor *cursors, int64_t limit, const struct glances *glances, uint8_t *coded) { \
        return take_glances(payload, cursors, streams, limit, glances, skips, coded); \
    }
GLANCES_OF(four, STREAMS, false)
GLANCES_OF(one, 1, false)
GLANCES_OF(four_skipping, STREAMS, true)
GLANCES_OF(one_skipping, 1, true)

/* Decode most elements of some streams into zeroed bytes. */
static int64_t read_glances(
    const uint8_t *payload, struct cursor *cursors, int streams, int64_t limit, const struct glances *glances,
    const uint64_t *codes, uint64_t mask, const struct symbol *symbols, uint8_t *coded) {
    for (;;) {
        bool more = streams == 1 ? (glances->skips ? take_glances_one_skipping : take_glances_one)(
                                       payload, cursors, limit, glances, coded)
                                 : (glances->skips ? take_glances_four_skipping : take_glances_four)(
                                       payload, cursors, limit, glances, coded);
        if (!more)
            return 0;
        for (int i = 0; i < streams; i++) {
            uint64_t position = (uint64_t)cursors[i].position;
            struct pair pair = take_pair(payload, &position, codes, mask, symbols);
            if (pair.step < 1 || pair.step > cursors[i].end - cursors[i].at)
                return DAMAGED;
            cursors[i].position = (int64_t)position;
            cursors[i].at += pair.step;
            coded[cursors[i].at - 1] = (uint8_t)pair.value;
        }
    }
}

/* Return the number of items that an entry has if their bits are the mean; 0 if some are not LOADABLE. */
static int64_t items_at_once(const struct symbol *symbols, int64_t count) {
    double bits = 0.0;
    for (int64_t i = 0; i < count; i++) {
        if (total_bits(&symbols[i]) > LOADABLE)
            return 0;
        if (symbols[i].length >= 0)
            bits += (double)total_bits(&symbols[i]) / (double)(UINT64_C(1) << symbols[i].length);
    }
    return (int64_t)(GLANCE / (bits > 1.0 ? bits : 1.0));
}

/* Fill the tables of bytes if they are the fastest way; return whether they are. */
static bool are_glanced(const struct symbol *symbols, int64_t count, struct reader *reader) {
    int64_t items = items_at_once(symbols, count);
    if (items < 2)
        return false;
    fill_table(reader->pairs, GLANCE, PAIR, symbols, count);
    return fill_glances(reader->pairs, least(items + 1, AT_ONCE), &reader->glances);
}

/* Decode most elements into zeroed bytes. */
static int64_t read_bytes(
    const uint8_t *payload, struct cursor cursors[STREAMS], int64_t limit, const uint64_t *codes, uint64_t mask,
    const struct symbol *symbols, const struct glances *glances, uint8_t *coded) {
    if (read_glances(payload, cursors, STREAMS, limit, glances, codes, mask, symbols, coded))
        return DAMAGED;
    for (int stream = 0; stream < STREAMS; stream++)
        if (read_glances(payload, &cursors[stream], 1, limit, glances, codes, mask, symbols, coded))
            return DAMAGED;
    return 0;
}
