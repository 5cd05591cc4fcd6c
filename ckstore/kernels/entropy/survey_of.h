/* Read elements of one width; included for each ELEMENT, with SUFFIXED(name) for the names. */

/* Find the non-zeros of a group, the bits of its largest element without its sign, and whether all are equal. */
static void SUFFIXED(survey)(const ELEMENT *coded, struct group *group, bool *equal) {
    ELEMENT first = coded[0], all = 0, different = 0;
    int64_t present = 0;
    /* In blocks whose count fits 32 bits, so that the compiler vectorises the loop. */
    for (int64_t block = 0; block < group->count; block += 8192) {
        int32_t here = 0;
        for (int64_t i = block; i < least(block + 8192, group->count); i++) {
            ELEMENT value = coded[i];
            here += value != 0;
            all |= (ELEMENT)(value ^ (value >> (8 * sizeof(ELEMENT) - 1)));
            different |= (ELEMENT)(value ^ first);
        }
        present += here;
    }
    group->pairs = present;
    group->top = bit_length((uint64_t)(int64_t)all);
    *equal = different == 0;
}

/* Copy evenly spaced blocks of a group's elements. */
static void SUFFIXED(sample)(const ELEMENT *coded, const struct group *group, int64_t *numbers) {
    int64_t blocks = sample_size(group) / SAMPLE_BLOCK;
    for (int64_t block = 0; block < blocks; block++) {
        const ELEMENT *from = coded + block * (group->count - SAMPLE_BLOCK) / blocks;
        for (int64_t i = 0; i < SAMPLE_BLOCK; i++)
            numbers[SAMPLE_BLOCK * block + i] = from[i];
    }
}

/* Split the elements of a dense group: planes, and the other bits as symbols, from the smallest number on, or numbers. */
static void SUFFIXED(take)(
    const ELEMENT *restrict coded, const struct group *group, uint16_t *restrict symbols, int64_t *restrict numbers,
    uint8_t *restrict planes) {
    int64_t count = group->count, width = group->plane, shift = 8 * width;
    for (int64_t i = 0; width == 1 && i < count; i++)
        planes[i] = (uint8_t)coded[i];
    for (int64_t i = 0; width == 2 && i < count; i++)
        store_bytes(planes + 2 * i, 2, (uint64_t)(int64_t)coded[i]);
    for (int64_t i = 0; width == 4 && i < count; i++)
        store_bytes(planes + 4 * i, 4, (uint64_t)(int64_t)coded[i]);
    if (!group->exact) {
        for (int64_t i = 0; i < count; i++)
            numbers[i] = (int64_t)coded[i] >> shift;
        return;
    }
    uint16_t smallest = (uint16_t)(1 << group->top);
    if (sizeof(ELEMENT) <= 4 && shift < 32)
        for (int64_t i = 0; i < count; i++)
            symbols[i] = (uint16_t)((int32_t)coded[i] >> shift) + smallest;
    else
        for (int64_t i = 0; i < count; i++)
            symbols[i] = (uint16_t)((int64_t)coded[i] >> shift) + smallest;
}

/* Return a mask of the `count` elements, at most 64, that are not zero, the first in the lowest bit. */
INLINE uint64_t SUFFIXED(non_zeros)(const ELEMENT *coded, int64_t count) {
    uint8_t flags[64] = {0};
    uint64_t mask = 0;
    if (count == 64)
        for (int i = 0; i < 64; i++)
            flags[i] = coded[i] != 0;
    else
        for (int64_t i = 0; i < count; i++)
            flags[i] = coded[i] != 0;
    /* The product moves the flag of byte i to bit 56 + i. */
    for (int i = 0; i < 8; i++)
        mask |= load_word(flags + 8 * i) * UINT64_C(0x0102040810204080) >> 56 << 8 * i;
    return mask;
}

/* Write the zero run before every non-zero of a group, and its value. Return the number of pairs. */
static int64_t SUFFIXED(extract)(const ELEMENT *coded, int64_t count, int64_t *runs, int64_t *values) {
    int64_t pair = 0, since = 0;
    for (int64_t at = 0; at < count; at += 64) {
        uint64_t mask = SUFFIXED(non_zeros)(coded + at, least(count - at, 64));
        for (; mask; mask &= mask - 1) {
            int64_t place = at + __builtin_ctzll(mask);
            runs[pair] = place - since;
            values[pair++] = coded[place];
            since = place + 1;
        }
    }
    return pair;
}

#undef ELEMENT
#undef SUFFIXED
