#include "tables.h"

/* Fill the symbols of a group. Return the bits of the longest code, or -1 if the table is damaged. */
static int64_t fill_symbols(
    const struct group *group, const int64_t *lowers, const uint8_t *raws, const uint8_t *lengths,
    struct symbol *symbols) {
    uint32_t codes[SYMBOLS];
    int64_t bins = group->bins, stride = group->run_bins, single = group->single;
    bool is_pair = group->kind == SPARSE;
    if (bins < 1 || stride < 1 || bins > SYMBOLS || stride > SYMBOLS || bins * stride > SYMBOLS)
        return -1;
    if (single >= bins * stride || group->top < 0 || group->top > 63)
        return -1;
    if (is_pair ? group->run_top < 0 || group->run_top > LONGEST_RUN : stride != 1)
        return -1;
    for (int64_t i = 0; i < bins + (is_pair ? stride : 0); i++) {
        int64_t top = i < bins ? group->top : group->run_top;
        if (raws[i] > top || magnitude_bits(lowers[i]) > top)
            return -1;
    }
    if (single >= 0)
        memset(codes, 0, (size_t)(bins * stride) * sizeof *codes);
    else if (canonical_codes(lengths, bins * stride, codes))
        return -1;
    int64_t longest = 0, symbol = 0;
    for (int64_t value = 0; value < bins; value++)
        for (int64_t place = bins; place < bins + stride; place++, symbol++) {
            int64_t length = codes[symbol] >> 16;
            longest = most(longest, length);
            symbols[symbol] = (struct symbol){
                .number = lowers[value],
                .run = is_pair ? lowers[place] : 0,
                .code = (int16_t)(codes[symbol] & 65535),
                .length = (int16_t)(length || symbol == single ? length : -1),
                .raw = raws[value],
                .run_raw = is_pair ? raws[place] : 0,
            };
        }
    return longest;
}

/* Fill the slots of one pair of a bin of runs and a bin of values, each run and value. */
static void fill_pairs(uint64_t *table, uint64_t size, const struct symbol *symbol) {
    uint64_t place = (uint64_t)symbol->code, step = UINT64_C(1) << total_bits(symbol);
    for (uint64_t raw = 0; raw < UINT64_C(1) << symbol->raw; raw++) {
        uint64_t entry = (uint64_t)total_bits(symbol) | (uint64_t)(symbol->run + 1) << 8 |
                         ((uint64_t)symbol->number + raw) << 32;
        for (uint64_t run = 0; run < UINT64_C(1) << symbol->run_raw; run++) {
            for (uint64_t slot = place; slot < size; slot += step)
                table[slot] = entry;
            place += UINT64_C(1) << symbol->length;
            entry += 256;
        }
    }
}

/* Fill the first 2^bits entries of a table of the kind SYMBOL or PAIR. */
static void fill_table(uint64_t *table, int64_t bits, int64_t tells, const struct symbol *symbols, int64_t count) {
    uint64_t size = UINT64_C(1) << bits;
    for (int64_t i = 0; i < count; i++) {
        const struct symbol *symbol = &symbols[i];
        if (symbol->length < 0)
            continue;
        if (tells == PAIR && resolves(symbol, bits)) {
            fill_pairs(table, size, symbol);
            continue;
        }
        uint64_t length = (uint64_t)symbol->length;
        uint64_t entry = tells == PAIR ? UNRESOLVED : length | (uint64_t)i << 8;
        uint64_t step = UINT64_C(1) << least(symbol->length, bits);
        for (uint64_t slot = (uint64_t)symbol->code & (size - 1); slot < size; slot += step)
            table[slot] = entry;
    }
}
