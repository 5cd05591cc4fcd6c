/* Decode the joint symbols of zero runs and values of sparse groups, and numbers of any width one by one. */
#include "tables.h"

enum {
    LOADABLE = 56,                    /* Maximal bits of a pair that one load always holds. */
    FEW = 1024,                       /* Minimal number of pairs that repays the making of a table of short pairs. */
    MOST_UNRESOLVED = 1 << LONGEST >> 4, /* Share of unresolved pairs, times 2^12, up to which it is faster. */
    TURN_PAIRS = 20,                  /* Maximal number of pairs of a turn, ... */
    TURN_BITS = 3 * LOOK + LOADABLE,  /* ... and maximal bits that it takes from a stream. */
};

/* The pairs that are left, and the place of the next one. */
struct pairs {
    int64_t left, at, end;
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

/* Take a pair of every stream and write its value. DAMAGED for a place beyond the end. */
INLINE int64_t take_four(
    const uint8_t *payload, uint64_t *p0, uint64_t *p1, uint64_t *p2, uint64_t *p3, const uint64_t *codes, uint64_t mask,
    const struct symbol *symbols, uint8_t *coded, int64_t size, struct pairs *pairs) {
    struct pair a = take_pair(payload, p0, codes, mask, symbols), b = take_pair(payload, p1, codes, mask, symbols);
    struct pair c = take_pair(payload, p2, codes, mask, symbols), d = take_pair(payload, p3, codes, mask, symbols);
    if (least(least(a.step, b.step), least(c.step, d.step)) < 1)
        return DAMAGED;
    int64_t r0 = pairs->at + a.step, r1 = r0 + b.step, r2 = r1 + c.step, r3 = r2 + d.step;
    /* Runs have at most LONGEST_RUN bits: the last place bounds the others. */
    if (r3 > pairs->end)
        return DAMAGED;
    store_bytes(coded + size * (r0 - 1), size, (uint64_t)a.value);
    store_bytes(coded + size * (r1 - 1), size, (uint64_t)b.value);
    store_bytes(coded + size * (r2 - 1), size, (uint64_t)c.value);
    store_bytes(coded + size * (r3 - 1), size, (uint64_t)d.value);
    pairs->at = r3;
    pairs->left -= 4;
    return 0;
}

/* Return the next 57 bits of a stream. Bit 63 is set, so that its later place shows the number of bits taken. */
INLINE uint64_t next_bits(const uint8_t *payload, uint64_t position) {
    return load_word(payload + (position >> 3)) >> (position & 7) | UINT64_C(1) << 63;
}

/* Take turns of pairs of at most LOADABLE bits of every stream, by a table of pairs if `short_pairs`. */
INLINE int64_t read_fours(
    const uint8_t *payload, int64_t positions[4], int64_t limit, bool short_pairs, const uint64_t *table,
    const uint64_t *codes, uint64_t mask, const struct symbol *symbols, uint8_t *coded, int64_t size,
    struct pairs *pairs) {
    uint64_t p0 = (uint64_t)positions[0], p1 = (uint64_t)positions[1];
    uint64_t p2 = (uint64_t)positions[2], p3 = (uint64_t)positions[3];
    int64_t last = short_pairs ? limit - TURN_BITS : limit, turn = short_pairs ? TURN_PAIRS : 4;
    struct pairs here = *pairs;
    while (turn <= here.left && most(most((int64_t)p0, (int64_t)p1), most((int64_t)p2, (int64_t)p3)) <= last) {
        bool resolved = short_pairs;
        if (short_pairs) {
            uint64_t w0 = next_bits(payload, p0), w1 = next_bits(payload, p1);
            uint64_t w2 = next_bits(payload, p2), w3 = next_bits(payload, p3);
            for (int i = 0; i < 4; i++) {
                uint64_t e0 = table[w0 & ((1 << LOOK) - 1)], e1 = table[w1 & ((1 << LOOK) - 1)];
                uint64_t e2 = table[w2 & ((1 << LOOK) - 1)], e3 = table[w3 & ((1 << LOOK) - 1)];
                if ((e0 | e1 | e2 | e3) & UNRESOLVED) {
                    resolved = false;
                    break;
                }
                int64_t r0 = here.at + (int64_t)(e0 >> 8 & 0xFFFF), r1 = r0 + (int64_t)(e1 >> 8 & 0xFFFF);
                int64_t r2 = r1 + (int64_t)(e2 >> 8 & 0xFFFF), r3 = r2 + (int64_t)(e3 >> 8 & 0xFFFF);
                if (r3 > here.end)
                    return DAMAGED;
                store_bytes(coded + size * (r0 - 1), size, (uint64_t)((int64_t)e0 >> 32));
                store_bytes(coded + size * (r1 - 1), size, (uint64_t)((int64_t)e1 >> 32));
                store_bytes(coded + size * (r2 - 1), size, (uint64_t)((int64_t)e2 >> 32));
                store_bytes(coded + size * (r3 - 1), size, (uint64_t)((int64_t)e3 >> 32));
                here.at = r3;
                here.left -= 4;
                w0 >>= e0 & 63;
                w1 >>= e1 & 63;
                w2 >>= e2 & 63;
                w3 >>= e3 & 63;
            }
            p0 += (uint64_t)__builtin_clzll(w0);
            p1 += (uint64_t)__builtin_clzll(w1);
            p2 += (uint64_t)__builtin_clzll(w2);
            p3 += (uint64_t)__builtin_clzll(w3);
        }
        if (!resolved && take_four(payload, &p0, &p1, &p2, &p3, codes, mask, symbols, coded, size, &here))
            return DAMAGED;
    }
    positions[0] = (int64_t)p0, positions[1] = (int64_t)p1, positions[2] = (int64_t)p2, positions[3] = (int64_t)p3;
    *pairs = here;
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

/* Decode most of the pairs into zeroed elements; `codes` is a table of the kind SYMBOL. */
INLINE int64_t read_pairs_of(
    const uint8_t *payload, int64_t positions[4], int64_t limit, bool short_pairs, const uint64_t *table,
    const uint64_t *codes, uint64_t mask, const struct symbol *symbols, uint8_t *coded, int64_t size,
    struct pairs *pairs) {
    if (short_pairs &&
        read_fours(payload, positions, limit, true, table, codes, mask, symbols, coded, size, pairs))
        return DAMAGED;
    return read_fours(payload, positions, limit, false, table, codes, mask, symbols, coded, size, pairs);
}

static int64_t read_pairs(
    const uint8_t *payload, int64_t positions[4], int64_t limit, bool short_pairs, const struct symbol *symbols,
    int64_t count, uint64_t *table, const uint64_t *codes, uint64_t mask, uint8_t *coded, int64_t size,
    struct pairs *pairs) {
    int64_t widest = 0;
    for (int64_t i = 0; i < count; i++)
        widest = most(widest, total_bits(&symbols[i]));
    if (widest > LOADABLE)
        return 0;
    if (short_pairs)
        fill_table(table, LOOK, PAIR, symbols, count);
#define READ(size) \
    return read_pairs_of(payload, positions, limit, short_pairs, table, codes, mask, symbols, coded, size, pairs)
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

/* Decode pairs or numbers of any width one by one, from item `first` on, whose low `width` bytes lie in a plane. */
static int64_t read_any(
    const uint8_t *payload, int64_t positions[4], int64_t limit, const uint64_t *codes, uint64_t mask,
    const struct symbol *symbols, const uint8_t *plane, int64_t width, uint8_t *coded, int64_t size, int64_t first,
    struct pairs *pairs) {
    for (int64_t i = first; pairs->left > 0; i++, pairs->left--) {
        int64_t position = positions[i & 3];
        if (position > limit)
            return DAMAGED;
        uint64_t entry = codes[load_word(payload + (position >> 3)) >> (position & 7) & mask];
        const struct symbol *symbol = &symbols[entry >> 8];
        position += (int64_t)(entry & 255);
        int64_t run = symbol->run + (int64_t)read_bits(payload, position, limit, symbol->run_raw);
        position += symbol->run_raw;
        uint64_t number = (uint64_t)symbol->number + read_bits(payload, position, limit, symbol->raw);
        positions[i & 3] = position + symbol->raw;
        if (run < 0 || run >= pairs->end - pairs->at)
            return DAMAGED;
        pairs->at += run;
        if (width)
            number = number << (8 * width) | low_bits(load_word(plane + width * i), 8 * width);
        switch (size) {
        case 1: store_bytes(coded + pairs->at, 1, number); break;
        case 2: store_bytes(coded + 2 * pairs->at, 2, number); break;
        case 4: store_bytes(coded + 4 * pairs->at, 4, number); break;
        default: store_bytes(coded + 8 * pairs->at, 8, number); break;
        }
        pairs->at++;
    }
    return 0;
}
