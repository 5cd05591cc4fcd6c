/* Rounded ordinals in arithmetic of one width; included for each INTEGER and its unsigned WORD, with SUFFIXED(name).
 *
 * Sums are those of words, which may wrap: the callers choose a width that holds the results. */

INLINE void SUFFIXED(rounded_integers)(
    const uint8_t *restrict bits, int64_t count, int64_t shift, int64_t unit, struct grid grid, int32_t *restrict out,
    int size) {
    const WORD sign = (WORD)1 << (8 * size - 1), up = (WORD)((INT64_C(5) << shift) >> 3);
    const INTEGER largest = MAX_INTEGER;
    for (int64_t k = 0; k < count;) {
        int64_t part = least(count - k, grid.width - grid.col);
        WORD away = up - (WORD)row_exponent(&grid) * (WORD)unit;
        const uint8_t *from = bits + size * k;
        for (int64_t i = 0; i < part; i++) {
            WORD value = (WORD)load_bytes(from + size * i, size), magnitude = value & (sign - 1);
            WORD sum = (value & sign ? 0 - magnitude : magnitude) + away;
            if (grid.cols)
                sum -= (WORD)grid.cols[grid.col + i] * (WORD)unit;
            INTEGER integer = (INTEGER)sum >> shift;
            integer = integer < largest ? integer : largest;
            out[k + i] = (int32_t)(integer > -largest ? integer : -largest);
        }
        advance(&grid, part);
        k += part;
    }
}

INLINE void SUFFIXED(rounded_bits)(
    const int32_t *restrict integers, int64_t count, int64_t shift, int64_t unit, struct grid grid, int64_t largest,
    uint8_t *restrict out, int size) {
    const INTEGER reach = (INTEGER)((INT64_C(5) << shift) >> 3), top = (INTEGER)largest;
    for (int64_t k = 0; k < count;) {
        int64_t part = least(count - k, grid.width - grid.col);
        WORD model = (WORD)row_exponent(&grid) * (WORD)unit;
        uint8_t *to = out + size * k;
        for (int64_t i = 0; i < part; i++) {
            WORD sum = ((WORD)integers[k + i] << shift) + model;
            if (grid.cols)
                sum += (WORD)grid.cols[grid.col + i] * (WORD)unit;
            INTEGER order = (INTEGER)sum, magnitude = order < 0 ? -order : order;
            WORD found = (WORD)(magnitude < top ? magnitude : top) | (WORD)(order < 0) << (8 * size - 1);
            store_bytes(to + size * i, size, magnitude > reach ? found : 0);
        }
        advance(&grid, part);
        k += part;
    }
}

#undef INTEGER
#undef WORD
#undef SUFFIXED
