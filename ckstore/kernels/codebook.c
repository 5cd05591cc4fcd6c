/* Kernels of the published schemes: histograms, assignment to levels, additive values, products of factors.
 *
 * Floats are passed as the words of float32 values. The exponent field alone decides whether a value is normal, so that a
 * process that flushes subnormals computes the same bits. */
#include "grid.h"

enum {
    BIN_SHIFT = 17,            /* Low bits that a histogram's bin drops from a word. */
    BINS = 1 << (32 - BIN_SHIFT), /* Bins of signed values; the lower half are those of magnitudes. */
    NOT_A_NUMBER = 0x7FC00000, /* The word of an element without a finite value. */
};

INLINE uint32_t field_of(uint32_t word) { return word >> 23 & 255; }

INLINE bool is_normal(uint32_t word) { return field_of(word) - 1 < 254; }

/* Return the value of a word; 0 unless it is normal. */
INLINE float normal_value(uint32_t word) {
    float value;
    memcpy(&value, &word, sizeof value);
    return is_normal(word) ? value : 0.0f;
}

/* Return the word of a sum of two values: at most `largest`, an `unknown` FLT_MAX, and +0 below the smallest normal
 * number, where sums are exact. */
INLINE uint32_t word_of(float sum, float largest) {
    float value = sum > largest ? largest : sum;
    value = value < -largest ? -largest : value;
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return fabsf(sum) >= FLT_MIN ? word : 0;
}

/* Return the lowest value of the bin at a place in ascending order, of a finite value; subnormals count as 0. */
INLINE double lowest_of(int64_t k) {
    uint32_t word = (uint32_t)(k < BINS / 2 ? BINS - k : k - BINS / 2) << BIN_SHIFT;
    return (double)normal_value(k < BINS / 2 ? word - 1 : word);
}

/* Find the cell of the lowest value of each bin of finite values, by the leading bits of a word. */
static void first_cells(const double *midpoints, uint8_t cells[BINS]) {
    const int64_t finite = 255 << (23 - BIN_SHIFT), last = BINS / 2 + finite;
    int64_t k = BINS / 2 - finite;
    for (int cell = 0; k < last; cell++) {
        int64_t end = k;
        for (int64_t beyond = last; end < beyond;) {
            int64_t middle = (end + beyond) / 2;
            if (midpoints[cell] < lowest_of(middle))
                beyond = middle;
            else
                end = middle + 1;
        }
        /* Negative bins come in descending order. */
        int64_t zero = least(most(BINS / 2, k), end);
        memset(cells + BINS - zero, cell, (size_t)(zero - k));
        memset(cells + zero - BINS / 2, cell, (size_t)(end - zero));
        k = end;
    }
}

int64_t KERNEL(nearest)(array words, array midpoints, int64_t zero, array out) {
    struct view from = input(words), edges = input(midpoints), to = output(out);
    const double *between = (const double *)edges.data;
    if (from.count < 0 || from.type != U4 || !is_of(&to, U1, from.count) || edges.type != F8 || edges.count < 1 ||
        edges.count > 256 || !(between[edges.count - 1] > DBL_MAX))
        return MISFIT;
    uint8_t cells[BINS];
    first_cells(between, cells);
    for (int64_t i = 0; i < from.count; i++) {
        uint32_t word = ((const uint32_t *)from.data)[i];
        int64_t index = cells[word >> BIN_SHIFT];
        double value = (double)normal_value(word);
        if (field_of(word) == 255)
            index = zero;
        else {
            index += between[index] < value; /* Mostly enough, and without a branch. */
            while (between[index] < value)
                index++;
        }
        to.data[i] = (uint8_t)index;
    }
    return 0;
}

int64_t KERNEL(add)(array base, array indices, array centroids, array out) {
    struct view from = input(base), by = input(indices), levels = input(centroids), to = output(out);
    if (from.count < 0 || from.type != U4 || !is_of(&by, U1, from.count) || !is_of(&to, U4, from.count) ||
        levels.type != F4 || levels.count < 0 || levels.count > 256)
        return MISFIT;
    float changes[256] = {0};
    memcpy(changes, levels.data, (size_t)levels.count * sizeof *changes);
    const float largest = (float)unknown(FLT_MAX);
    const uint32_t *restrict known = (const uint32_t *)from.data;
    const uint8_t *restrict chosen = by.data;
    uint32_t *restrict sums = (uint32_t *)to.data;
    for (int64_t i = 0; i < from.count; i++)
        sums[i] = word_of(normal_value(known[i]) + changes[chosen[i]], largest);
    return 0;
}

/* Products of a row are summed for this many columns at once. */
enum { COLUMNS = 512 };

/* Numbers of factors: a weight for each direction, then `rows` rows and `rank` columns of the two matrices. */
struct factors {
    const int32_t *weights, *left, *right;
    int64_t rank, rows, width;
};

/* Return the magnitude of a number, at least 1. */
INLINE int64_t size_of(int32_t number) { return most(number < 0 ? -(int64_t)number : number, 1); }

/* Return whether all sums of products, and the parts of these, fit 32 bits. */
static bool sums_fit(const struct factors *factors) {
    int64_t total = 0;
    for (int64_t k = 0; k < factors->rank; k++) {
        int64_t left = 1, right = 1;
        for (int64_t i = 0; i < factors->rows; i++)
            left = most(left, size_of(factors->left[i * factors->rank + k]));
        for (int64_t j = 0; j < factors->width; j++)
            right = most(right, size_of(factors->right[k * factors->width + j]));
        int64_t product = size_of(factors->weights[k]) * left;
        if (product > INT32_MAX)
            return false;
        product *= right;
        total += product;
        if (product > INT32_MAX || total > INT32_MAX)
            return false;
    }
    return true;
}

/* Write the sums of products of a row, for `columns` columns from `first` on. */
INLINE void sum_products(
    const struct factors *factors, const int32_t *left, int64_t first, int64_t columns, int32_t *restrict sums) {
    memset(sums, 0, (size_t)columns * sizeof *sums);
    /* Four directions at once, without those of which the row has nothing: fewer sums are read and written. */
    int64_t found = 0;
    int32_t by[4] = {0};
    const int32_t *right[4];
    for (int64_t k = 0; k < factors->rank; k++) {
        if (!(by[found] = factors->weights[k] * left[k]))
            continue;
        right[found++] = factors->right + k * factors->width + first;
        if (found == 4) {
            for (int64_t j = 0; j < columns; j++)
                sums[j] += by[0] * right[0][j] + by[1] * right[1][j] + by[2] * right[2][j] + by[3] * right[3][j];
            found = 0;
        }
    }
    for (int64_t n = 0; n < found; n++)
        for (int64_t j = 0; j < columns; j++)
            sums[j] += by[n] * right[n][j];
}

int64_t KERNEL(add_products)(
    array base, array numbers, int64_t rank, int64_t width, int64_t step, int64_t start, array out) {
    struct view from = input(base), by = input(numbers), to = output(out);
    if (from.count < 0 || from.type != U4 || !is_of(&to, U4, from.count) || by.type != I4 || by.count < 0 || rank < 1 ||
        rank > by.count || width < 1 || width > by.count / rank || start < 0 || start % width || from.count % width ||
        step < -1022 || step > 1000)
        return MISFIT;
    const int32_t *all = (const int32_t *)by.data;
    int64_t rows = by.count / rank - width - 1, first = start / width;
    struct factors factors = {all, all + rank, all + rank * (1 + rows), rank, rows, width};
    if (rows < 0 || rank * (1 + rows + width) != by.count || first + from.count / width > rows)
        return MISFIT;
    if (!sums_fit(&factors))
        return DAMAGED;
    const double unit = power_of_two(step), largest = unknown(FLT_MAX);
    const uint32_t *known = (const uint32_t *)from.data;
    uint32_t *words = (uint32_t *)to.data;
    int32_t sums[COLUMNS];
    for (int64_t at = 0; at < from.count;) {
        int64_t column = at % width, columns = least(width - column, COLUMNS);
        sum_products(&factors, factors.left + (first + at / width) * rank, column, columns, sums);
        for (int64_t j = 0; j < columns; j++, at++) {
            double value = clamped((double)normal_value(known[at]) + (double)sums[j] * unit, largest);
            float rounded = (float)value;
            uint32_t word;
            memcpy(&word, &rounded, sizeof word);
            words[at] = fabs(value) >= FLT_MIN ? word : 0;
        }
    }
    return 0;
}

int64_t KERNEL(difference)(array words, array base, array out) {
    struct view from = input(words), before = input(base), to = output(out);
    if (from.count < 0 || from.type != U4 || !is_of(&before, U4, from.count) || !is_of(&to, U4, from.count))
        return MISFIT;
    const uint32_t *restrict minuends = (const uint32_t *)from.data, *restrict others = (const uint32_t *)before.data;
    uint32_t *restrict differences = (uint32_t *)to.data;
    const float largest = (float)unknown(FLT_MAX);
    for (int64_t i = 0; i < from.count; i++) {
        uint32_t change = word_of(normal_value(minuends[i]) - normal_value(others[i]), largest);
        differences[i] = field_of(minuends[i]) == 255 ? NOT_A_NUMBER : change;
    }
    return 0;
}

int64_t KERNEL(bucket_statistics)(array words, array counts, array sums, int64_t shift) {
    struct view from = input(words), numbers = output(counts), totals = output(sums);
    if (from.count < 0 || from.type != U4 || shift < 0 || shift > 31 || numbers.type != I8 ||
        numbers.count < INT64_C(1) << (32 - shift) || !is_of(&totals, F8, numbers.count))
        return MISFIT;
    for (int64_t i = 0; i < from.count; i++) {
        uint32_t word = ((const uint32_t *)from.data)[i];
        if (is_normal(word)) {
            ((int64_t *)numbers.data)[word >> shift]++;
            ((double *)totals.data)[word >> shift] += (double)normal_value(word);
        }
    }
    return 0;
}

/* Return the bin of a magnitude. */
INLINE int64_t bin_of(uint32_t word) { return (word & 0x7FFFFFFF) >> BIN_SHIFT; }

int64_t KERNEL(rank_counts)(array words, array ranks, array counts) {
    struct view from = input(words), by = input(ranks), to = output(counts);
    if (from.count < 0 || from.type != U4 || !is_of(&by, U4, from.count) || !is_of(&to, I8, BINS / 2))
        return MISFIT;
    for (int64_t i = 0; i < from.count; i++) {
        uint32_t word = ((const uint32_t *)from.data)[i];
        if (field_of(word) != 255)
            ((int64_t *)to.data)[field_of(word) ? bin_of(((const uint32_t *)by.data)[i]) : 0]++;
    }
    return 0;
}

/* Bins of magnitudes and sensitivities: elements below the first two are pruned, those from the last two on protected. */
struct split {
    int64_t pruned, insensitive, large, sensitive;
};

/* Return 1 for a protected element, -1 for a pruned one and 0 for a quantised one. */
INLINE int side_of(uint32_t word, uint32_t sensitivity, const struct split *split) {
    int64_t magnitude = bin_of(word), rank = bin_of(sensitivity);
    if (!is_normal(word))
        return -1;
    if (magnitude >= split->large || rank >= split->sensitive)
        return 1;
    return magnitude < split->pruned || rank < split->insensitive ? -1 : 0;
}

int64_t KERNEL(level_counts)(
    array words, array sensitivities, int64_t pruned, int64_t insensitive, int64_t large, int64_t sensitive,
    array counts) {
    struct view from = input(words), by = input(sensitivities), to = output(counts);
    struct split split = {pruned, insensitive, large, sensitive};
    if (from.count < 0 || from.type != U4 || !is_of(&by, U4, from.count) || !is_of(&to, I8, BINS))
        return MISFIT;
    for (int64_t i = 0; i < from.count; i++) {
        uint32_t word = ((const uint32_t *)from.data)[i];
        if (side_of(word, ((const uint32_t *)by.data)[i], &split) == 0)
            ((int64_t *)to.data)[word >> BIN_SHIFT]++;
    }
    return 0;
}

int64_t KERNEL(split_indices)(
    array words, array sensitivities, int64_t pruned, int64_t insensitive, int64_t large, int64_t sensitive,
    int64_t zero, int64_t aside, array out) {
    struct view from = input(words), by = input(sensitivities), to = output(out);
    struct split split = {pruned, insensitive, large, sensitive};
    if (from.count < 0 || from.type != U4 || !is_of(&by, U4, from.count) || !is_of(&to, U1, from.count))
        return MISFIT;
    for (int64_t i = 0; i < from.count; i++) {
        int side = side_of(((const uint32_t *)from.data)[i], ((const uint32_t *)by.data)[i], &split);
        if (side)
            to.data[i] = (uint8_t)(side < 0 ? zero : aside);
    }
    return 0;
}
