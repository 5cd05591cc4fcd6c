/* The canonical codes of code lengths. */
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
