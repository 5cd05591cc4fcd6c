/* Huffman code lengths of at most 12 bits from counts, and the canonical codes of lengths. */
#include "directory.h"
#include "words.h"

/* See kernels.h. */
static int64_t canonical_codes(const uint8_t *lengths, int64_t symbols, uint32_t *codes) {
    uint32_t tally[LONGEST + 1] = {0}, first[LONGEST + 1] = {0};
    for (int64_t symbol = 0; symbol < symbols; symbol++) {
        if (lengths[symbol] > LONGEST)
            return DAMAGED;
        tally[lengths[symbol]]++;
    }
    uint32_t code = 0;
    uint64_t total = 0;
    for (int length = 1; length <= LONGEST; length++) {
        first[length] = code;
        code = (code + tally[length]) << 1;
        total += (uint64_t)tally[length] << (LONGEST - length);
    }
    if (total != 1 << LONGEST)
        return DAMAGED;
    for (int64_t symbol = 0; symbol < symbols; symbol++) {
        uint32_t length = lengths[symbol], reverse = 0;
        code = first[length]++;
        for (uint32_t i = 0; i < length; i++, code >>= 1)
            reverse = reverse << 1 | (code & 1);
        codes[symbol] = reverse | length << 16;
    }
    return 0;
}

int64_t KERNEL(canonical_codes)(array lengths, array codes) {
    struct view from = input(lengths), to = output(codes);
    if (!is_of(&from, U1, to.count) || !is_of(&to, U4, from.count))
        return MISFIT;
    return canonical_codes(from.data, from.count, (uint32_t *)to.data);
}

/* Bits of a key that hold its symbol. */
enum { SYMBOL_BITS = 13 };

/* Sort in place, by Shell's method with the gaps of Ciura (2001). */
static void sort_keys(int64_t *keys, int64_t count) {
    static const int gaps[] = {1750, 701, 301, 132, 57, 23, 10, 4, 1};
    for (size_t turn = 0; turn < sizeof gaps / sizeof *gaps; turn++) {
        int gap = gaps[turn];
        for (int64_t i = gap; i < count; i++) {
            int64_t key = keys[i], at = i;
            for (; at >= gap && keys[at - gap] > key; at -= gap)
                keys[at] = keys[at - gap];
            keys[at] = key;
        }
    }
}

/* Turn the ascending counts of at least two symbols into Huffman's lengths, by the in-place algorithm of Moffat and
 * Katajainen (1995). */
static void huffman_lengths(int64_t *work, int64_t used) {
    int64_t leaf = 2, root = 0;
    work[0] += work[1];
    for (int64_t node = 1; node < used - 1; node++) {
        if (leaf >= used || work[root] < work[leaf]) {
            work[node] = work[root];
            work[root++] = node;
        } else
            work[node] = work[leaf++];
        if (leaf >= used || (root < node && work[root] < work[leaf])) {
            work[node] += work[root];
            work[root++] = node;
        } else
            work[node] += work[leaf++];
    }
    work[used - 2] = 0;
    for (int64_t node = used - 3; node >= 0; node--)
        work[node] = work[work[node]] + 1;
    int64_t available = 1, inner = 0, depth = 0, node = used - 1;
    root = used - 2;
    while (available > 0) {
        for (; root >= 0 && work[root] == depth; root--)
            inner++;
        for (; available > inner; available--)
            work[node--] = depth;
        available = 2 * inner;
        depth++;
        inner = 0;
    }
}

/* Write the code length of each of `symbols` counts (0 if the count is 0): Huffman's, cut at 12 bits, then completed to a
 * full code from the rarest symbols upwards. Return the only symbol that occurs or -1; `bits` is the sum of count times
 * length. */
static int64_t code_lengths(const int64_t *counts, int64_t symbols, uint8_t *lengths, int64_t *bits) {
    int64_t keys[SYMBOLS], work[SYMBOLS], used = 0;
    memset(lengths, 0, (size_t)symbols);
    for (int64_t symbol = 0; symbol < symbols; symbol++)
        if (counts[symbol] > 0)
            keys[used++] = counts[symbol] << SYMBOL_BITS | symbol;
    *bits = 0;
    if (used < 2)
        return used ? keys[0] & ((1 << SYMBOL_BITS) - 1) : -1;
    sort_keys(keys, used);
    for (int64_t i = 0; i < used; i++)
        work[i] = keys[i] >> SYMBOL_BITS;
    huffman_lengths(work, used);
    /* From here on, work[i] is the length of the i-th rarest symbol, longest first. */
    int64_t total = 0;
    for (int64_t i = 0; i < used; i++) {
        work[i] = least(work[i], LONGEST);
        total += 1 << (LONGEST - work[i]);
    }
    for (int64_t i = 0; total > 1 << LONGEST;) {
        while (work[i] == LONGEST)
            i++;
        total -= 1 << (LONGEST - work[i] - 1);
        work[i]++;
    }
    for (int64_t i = used - 1; i >= 0; i--)
        while (total + (1 << (LONGEST - work[i])) <= 1 << LONGEST) {
            total += 1 << (LONGEST - work[i]);
            work[i]--;
        }
    for (int64_t i = 0; i < used; i++) {
        lengths[keys[i] & ((1 << SYMBOL_BITS) - 1)] = (uint8_t)work[i];
        *bits += (keys[i] >> SYMBOL_BITS) * work[i];
    }
    return -1;
}

int64_t KERNEL(code_lengths)(array counts, array lengths, int64_t *bits) {
    struct view from = input(counts), to = output(lengths);
    if (!is_of(&from, I8, to.count) || !is_of(&to, U1, from.count) || from.count > SYMBOLS)
        return MISFIT;
    return code_lengths((const int64_t *)from.data, from.count, to.data, bits);
}
