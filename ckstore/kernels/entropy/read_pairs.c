/* Decode the joint symbols of zero runs and values of sparse groups, and numbers of any width one by one. */
#include "tables.h"

enum {
    LOADABLE = 56,                    /* Maximal bits of a pair that one load always holds. */
    FEW = 1024,                       /* Minimal number of pairs that repays the making of a table of short pairs. */
    MOST_UNRESOLVED = 1 << LONGEST >> 4, /* Share of unresolved pairs, times 2^12, up to which it is faster. */
    TURN_PAIRS = 5,                   /* Maximal number of pairs of a stream's turn, ... */
    TURN_BITS = 3 * LOOK + LOADABLE,  /* ... and maximal bits that they take. */
};

struct pair {
    int64_t step, value;  /* Run plus one; value. */
};

/* Take a pair of at most LOADABLE bits. */
INLINE struct pair take_pair(
    const uint8_t *payload, uint64_t *position, const uint64_t *codes, uint64_t mask, const struct symbol *symbols) {
    uint64_t word = load_word(payload + (*position >> 3)) >> (*position & 7), entry = codes[word & mask];
    const struct symbol *symbol = &symbols[entry >> 8];
    uint64_t run_raw = (uint64_t)symbol->run_raw, raw = (uint64_t)symbol->raw;
    word >>= entry & 63;
    *position += (entry & 63) + run_raw + raw;
    return (struct pair){
        .step = symbol->run + (int64_t)low_bits(word, (int64_t)run_raw) + 1,
        .value = (int64_t)((uint64_t)symbol->number + low_bits(word >> run_raw, (int64_t)raw)),
    };
}

/* Take a pair of every stream and write its value, after that of the stream before if `chained`. DAMAGED for a place
 * beyond the elements. */
INLINE int64_t take_four(
    const uint8_t *payload, uint64_t positions[STREAMS], int64_t places[STREAMS], const struct cursor *cursors,
    bool chained, const uint64_t *codes, uint64_t mask, const struct symbol *symbols, uint8_t *coded, int64_t size) {
    struct pair a = take_pair(payload, &positions[0], codes, mask, symbols);
    struct pair b = take_pair(payload, &positions[1], codes, mask, symbols);
    struct pair c = take_pair(payload, &positions[2], codes, mask, symbols);
    struct pair d = take_pair(payload, &positions[3], codes, mask, symbols);
    int64_t r0 = places[0] + a.step, r1 = (chained ? r0 : places[1]) + b.step;
    int64_t r2 = (chained ? r1 : places[2]) + c.step, r3 = (chained ? r2 : places[3]) + d.step;
    /* Runs have at most LONGEST_RUN bits: no sum overflows. */
    int64_t room = (a.step - 1) | (b.step - 1) | (c.step - 1) | (d.step - 1);
    room |= (cursors[0].end - r0) | (cursors[1].end - r1) | (cursors[2].end - r2) | (cursors[3].end - r3);
    if (room < 0)
        return DAMAGED;
    store_bytes(coded + size * (r0 - 1), size, (uint64_t)a.value);
    store_bytes(coded + size * (r1 - 1), size, (uint64_t)b.value);
    store_bytes(coded + size * (r2 - 1), size, (uint64_t)c.value);
    store_bytes(coded + size * (r3 - 1), size, (uint64_t)d.value);
    places[0] = chained ? r3 : r0, places[1] = r1, places[2] = r2, places[3] = r3;
    return 0;
}

/* Return the next 57 bits of a stream. Bit 63 is set, so that its later place shows the number of bits taken. */
INLINE uint64_t next_bits(const uint8_t *payload, uint64_t position) {
    return load_word(payload + (position >> 3)) >> (position & 7) | UINT64_C(1) << 63;
}

/* Take turns of pairs of at most LOADABLE bits of every stream, by a table of pairs if `short_pairs`. No stream has
 * fewer than `left`. If they are `chained`, the first cursor has the place of all; those of dense groups have no runs,
 * and as many elements. */
INLINE int64_t read_fours(
    const uint8_t *payload, struct cursor cursors[STREAMS], int64_t limit, int64_t *left, bool short_pairs,
    bool is_dense, bool chained, const uint64_t *table, const uint64_t *codes, uint64_t mask,
    const struct symbol *symbols, uint8_t *coded, int64_t size) {
    int64_t last = short_pairs ? limit - TURN_BITS : limit, turn = short_pairs ? TURN_PAIRS : 1, items = *left;
    uint64_t positions[STREAMS], words[STREAMS];
    int64_t places[STREAMS];
    UNROLLED
    for (int i = 0; i < STREAMS; i++) {
        positions[i] = (uint64_t)cursors[i].position;
        places[i] = cursors[i].at;
    }
    while (turn <= items && most(most((int64_t)positions[0], (int64_t)positions[1]),
                                 most((int64_t)positions[2], (int64_t)positions[3])) <= last) {
        bool resolved = short_pairs;
        if (short_pairs) {
            UNROLLED
            for (int i = 0; i < STREAMS; i++)
                words[i] = next_bits(payload, positions[i]);
            for (int pair = 0; pair < TURN_PAIRS - 1; pair++) {
                uint64_t entries[STREAMS];
                UNROLLED
                for (int i = 0; i < STREAMS; i++)
                    entries[i] = table[words[i] & ((1 << LOOK) - 1)];
                if ((entries[0] | entries[1] | entries[2] | entries[3]) & UNRESOLVED) {
                    resolved = false;
                    break;
                }
                UNROLLED
                for (int i = 0; i < STREAMS; i++) {
                    int stream = chained ? 0 : i;
                    places[stream] += is_dense ? 1 : (int64_t)(entries[i] >> 8 & 0xFFFF);
                    if (!is_dense && places[stream] > cursors[stream].end)
                        return DAMAGED;
                    store_bytes(coded + size * (places[stream] - 1), size, (uint64_t)((int64_t)entries[i] >> 32));
                    words[i] >>= entries[i] & 63;
                }
                items--;
            }
            UNROLLED
            for (int i = 0; i < STREAMS; i++)
                positions[i] += (uint64_t)__builtin_clzll(words[i]);
        }
        if (!resolved) {
            if (take_four(payload, positions, places, cursors, chained, codes, mask, symbols, coded, size))
                return DAMAGED;
            items--;
        }
    }
    UNROLLED
    for (int i = 0; i < STREAMS; i++) {
        cursors[i].position = (int64_t)positions[i];
        cursors[i].at = places[i];
    }
    *left = items;
    return 0;
}

/* Return whether a table of pairs is the fastest way to read that many items. */
static bool are_short(const struct symbol *symbols, int64_t count, int64_t items) {
    int64_t unresolved = 0;
    if (items < FEW)
        return false;
    for (int64_t i = 0; i < count; i++)
        if (symbols[i].length >= 0 && !resolves(&symbols[i], LOOK))
            unresolved += (1 << LONGEST) >> symbols[i].length;
    return unresolved <= MOST_UNRESOLVED;
}

/* Functions of their own, so that the compiler keeps streams in registers. */
#define FOURS(name, size, short_pairs, is_dense, chained) \
    static __attribute__((noinline)) int64_t name##_##size( \
        const uint8_t *payload, struct cursor cursors[STREAMS], int64_t limit, int64_t *left, const uint64_t *table, \
        const uint64_t *codes, uint64_t mask, const struct symbol *symbols, uint8_t *coded) { \
        return read_fours( \
            payload, cursors, limit, left, short_pairs, is_dense, chained, table, codes, mask, symbols, coded, size); \
    }
#define ALL_FOURS(size) \
    FOURS(read_pairs, size, false, false, false) \
    FOURS(read_short_pairs, size, true, false, false) \
    FOURS(read_short_dense, size, true, true, false) \
    FOURS(read_chained, size, false, false, true) \
    FOURS(read_short_chained, size, true, false, true)
ALL_FOURS(1)
ALL_FOURS(2)
ALL_FOURS(4)
ALL_FOURS(8)

/* Decode most of the pairs into zeroed elements, or the numbers of a dense group; `left` are those of a stream, and
 * `codes` is a table of the kind SYMBOL. */
static int64_t read_pairs(
    const uint8_t *payload, struct cursor cursors[STREAMS], int64_t limit, int64_t *left, bool short_pairs,
    const struct group *group, const struct symbol *symbols, int64_t count, uint64_t *table, const uint64_t *codes,
    uint64_t mask, uint8_t *coded, int64_t size) {
    int64_t widest = 0;
    bool is_dense = group->kind == DENSE, chained = !has_quarters(group);
    for (int64_t i = 0; i < count; i++)
        widest = most(widest, total_bits(&symbols[i]));
    if (widest > LOADABLE)
        return 0;
    if (short_pairs)
        fill_table(table, LOOK, PAIR, symbols, count);
#define READ(size) \
    if (short_pairs && (chained    ? read_short_chained_##size \
                        : is_dense ? read_short_dense_##size \
                                   : read_short_pairs_##size)(payload, cursors, limit, left, table, codes, mask, symbols, coded)) \
        return DAMAGED; \
    return (chained ? read_chained_##size : read_pairs_##size)( \
        payload, cursors, limit, left, table, codes, mask, symbols, coded)
    WITH_SIZE(size, READ)
#undef READ
}

/* Return up to 63 raw bits at a position; loads beyond `limit` are moved there. */
INLINE uint64_t read_bits(const uint8_t *payload, int64_t position, int64_t limit, int64_t bits) {
    uint64_t result = 0;
    for (int64_t done = 0; done < bits; done += 32) {
        int64_t at = least(position + done, limit);
        uint64_t word = load_word(payload + (at >> 3)) >> (at & 7);
        result |= low_bits(word, least(bits - done, 32)) << done;
    }
    return result;
}

/* Decode at most `left` pairs or numbers of any width of a stream one by one, whose low `width` bytes lie in a plane. */
static int64_t read_any(
    const uint8_t *payload, struct cursor *cursor, int64_t limit, int64_t left, const uint64_t *codes, uint64_t mask,
    const struct symbol *symbols, const uint8_t *plane, int64_t width, uint8_t *coded, int64_t size) {
    int64_t position = cursor->position, at = cursor->at;
    for (; left > 0 && at < cursor->end; left--) {
        if (position > limit)
            return DAMAGED;
        uint64_t entry = codes[load_word(payload + (position >> 3)) >> (position & 7) & mask];
        const struct symbol *symbol = &symbols[entry >> 8];
        position += (int64_t)(entry & 255);
        int64_t run = symbol->run + (int64_t)read_bits(payload, position, limit, symbol->run_raw);
        position += symbol->run_raw;
        uint64_t number = (uint64_t)symbol->number + read_bits(payload, position, limit, symbol->raw);
        position += symbol->raw;
        if (run < 0 || run >= cursor->end - at)
            return DAMAGED;
        at += run;
        if (width)
            number = number << (8 * width) | low_bits(load_word(plane + width * at), 8 * width);
        switch (size) {
        case 1: store_bytes(coded + at, 1, number); break;
        case 2: store_bytes(coded + 2 * at, 2, number); break;
        case 4: store_bytes(coded + 4 * at, 4, number); break;
        default: store_bytes(coded + 8 * at, 8, number); break;
        }
        at++;
    }
    cursor->position = position;
    cursor->at = at;
    return 0;
}
