/* The encoder's plan: kind, plane, bins and code lengths of every group, by measured cost. */
#include "encoder.h"
#include "words.h"

/* Measured bits of a group in the directory, and of each of its symbols. */
static const double TABLE_BITS = 48.0, BIN_BITS = 7.0, PAIR_BITS = 6.0;

/* The share by which a plane may enlarge a group. */
static const double PLANE_SHARE = 0.0003;

/* Minimal savings, in bits, of a symbol of the table; and as a share of its group's elements: the price of the time that
 * larger tables take. */
static const double PRICE_BITS = 8.0, PRICE_SHARE = 1.0 / 8192;

/* Bits that cutting a bin of a sample saves by chance: a cut at random saves half a nat, the best of many more. */
static const double CHANCE_BITS = 6.0;

/* Ratio of size to entropy from which pairs, which take five times as long to encode, are tried; and the share of the
 * size that they must save. */
static const double WELL_CODED = 1.021, PAIRS_SHARE = 0.002;

enum {
    /* Groups of more elements are counted by a sample, one block in SHARE, if their numbers have at most SHARED_BITS
     * bits without their sign. */
    MANY = 1 << 15,
    SHARED_BITS = 8,
    SHARE = 4,
    COUNTED = 1024,
    /* Groups of fewer elements get coarser histograms. */
    FEW_ELEMENTS = 2048,
    /* Cuts of an octave, and octaves of which every number has a cell. */
    FINE = 7,
    FINEST = 11,
    EXACT = 12,
    EXACT_IF_FEW = 6,
    FINE_IF_FEW = 5,
    MOST_EXACT = 15,
};

/* Return the minimal savings, in bits, of a symbol in a group of `count` elements. */
static double price_of(int64_t count) { return PRICE_BITS + (double)count * PRICE_SHARE; }

/* Count symbols below `size` in one block of `share`.
 *
 * Small histograms use four tables, because an addition waits for the one before. */
static void count_exact(const uint16_t *symbols, int64_t count, int64_t size, int64_t share, int64_t *cells) {
    int64_t stride = size <= 4096 ? size : 0;
    memset(cells, 0, (size_t)((stride ? 4 : 1) * size) * sizeof *cells);
    for (int64_t block = 0; block < count; block += COUNTED * share) {
        int64_t end = least(block + COUNTED, count), i = block;
        for (; i + 4 <= end; i += 4) {
            cells[symbols[i]]++;
            cells[stride + symbols[i + 1]]++;
            cells[stride * 2 + symbols[i + 2]]++;
            cells[stride * 3 + symbols[i + 3]]++;
        }
        for (; i < end; i++)
            cells[symbols[i]]++;
    }
    for (int64_t i = 0; i < stride; i++)
        cells[i] = share * (cells[i] + cells[stride + i] + cells[stride * 2 + i] + cells[stride * 3 + i]);
}

/* Count numbers of up to `top` bits by cell, `size` of them, and write their cells. `cells` has room for four times as
 * many. */
static void count_cells(
    const int64_t *restrict numbers, int64_t count, int64_t top, int64_t exact, const struct geometry *geometry,
    int64_t size, int64_t *restrict cells, uint16_t *restrict symbols) {
    if (top <= exact) {
        int64_t smallest = INT64_C(1) << top;
        for (int64_t i = 0; i < count; i++)
            symbols[i] = (uint16_t)(numbers[i] + smallest);
        count_exact(symbols, count, size, 1, cells);
        return;
    }
    memset(cells, 0, (size_t)size * sizeof *cells);
    for (int64_t i = 0; i < count; i++) {
        int64_t cell = cell_of(numbers[i], geometry);
        symbols[i] = (uint16_t)cell;
        cells[cell]++;
    }
}

/* List the best bins, at most `limit`; see `list_bins`. Return their number. */
static int64_t best_bins(
    const int64_t *cells, const struct geometry *geometry, int64_t top, int64_t deepest, double price, int64_t all_occur,
    int64_t limit, uint8_t *splits, struct bin_tables tables) {
    int64_t floors[2];
    double losses[8];
    for (;; price *= 2) {
        choose_bins(cells, geometry, top, deepest, price, SPLIT_BITS, splits, floors, losses);
        int64_t bins = list_bins(cells, geometry, top, deepest, all_occur, splits, floors, tables, limit);
        if (bins <= limit)
            return bins;
    }
}

/* Find a group's code lengths and fill `costs`: bits with its table, and entropy. */
static void set_codes(
    struct group *group, const int64_t *counts, bool is_pair, const uint8_t *raws, uint8_t *lengths, double costs[2]) {
    int64_t bins = group->bins, stride = group->run_bins, widest = 0, total = 0, used = 0, bits, symbol = 0;
    double entropy = 0.0;
    group->single = code_lengths(counts, bins * stride, lengths, &bits);
    for (int64_t value = 0; value < bins; value++)
        for (int64_t run = 0; run < stride; run++, symbol++) {
            int64_t count = counts[symbol];
            if (!count)
                continue;
            int64_t raw = raws[value] + (is_pair ? raws[bins + run] : 0);
            used++;
            total += count;
            bits += count * raw;
            entropy += (double)(count * raw) - times_log(count);
            widest = most(widest, lengths[symbol] + raw);
        }
    /* The counts of a sample are smaller than the number of items. */
    double scale = (double)(is_pair ? group->pairs : group->count) / (double)total;
    group->bits = (int64_t)((double)bits * scale);
    group->widest = widest;
    costs[0] = (double)bits * scale + TABLE_BITS + (is_pair ? PAIR_BITS : BIN_BITS) * (double)used;
    costs[1] = (entropy + times_log(total)) * scale;
}

/* Return the widest plane that costs next to nothing, by the group's sample. */
static int64_t choose_plane(const struct group *group, struct encoder *encoder) {
    struct geometry geometry;
    int64_t taken = sample_size(group), top = group->top, count = group->count, floors[2];
    double losses[8];
    int64_t fine = count < FEW_ELEMENTS || top > MOST_EXACT ? FINE_IF_FEW : FINE;
    int64_t size = set_geometry(top, fine + 1, fine, &geometry);
    count_cells(
        encoder->numbers + group->start, taken, top, fine + 1, &geometry, size, encoder->cells,
        encoder->symbols + group->start);
    double share = (double)taken / (double)count;
    double split_bits = CHANCE_BITS * (1.0 - share) + SPLIT_BITS * share;
    double bits = choose_bins(
        encoder->cells, &geometry, top, fine, price_of(count) * share, split_bits, encoder->splits, floors, losses);
    for (int64_t width = 4; width; width >>= 1)
        if (8 * width <= top && losses[width] <= PLANE_SHARE * bits)
            return width;
    return 0;
}

/* Choose bins and code lengths of a dense group; mark it as `paired` if pairs might be smaller. */
static void plan_dense(
    struct group *group, struct encoder *encoder, int64_t *lowers, uint8_t *raws, uint8_t *lengths, double costs[2]) {
    struct geometry geometry;
    int64_t counts[SYMBOLS], count = group->count, top = group->top, share = 1, size;
    int64_t deepest = group->plane || count < FEW_ELEMENTS ? FINE : FINEST;
    uint16_t *symbols = encoder->symbols + group->start;
    if (group->exact) {
        size = set_geometry(top, MOST_EXACT, 0, &geometry);
        if (top <= SHARED_BITS && count > MANY)
            share = SHARE;
        count_exact(symbols, count, size, share, encoder->cells);
    } else {
        int64_t exact = count < FEW_ELEMENTS ? EXACT_IF_FEW : EXACT, fine = count < FEW_ELEMENTS ? FINE_IF_FEW : FINE;
        size = set_geometry(top, exact, fine, &geometry);
        count_cells(encoder->numbers + group->start, count, top, exact, &geometry, size, encoder->cells, symbols);
    }
    group->bins = best_bins(
        encoder->cells, &geometry, top, deepest, price_of(count), share > 1, SYMBOLS, encoder->splits,
        (struct bin_tables){lowers, raws, counts});
    group->run_bins = 1;
    set_codes(group, counts, false, raws, lengths, costs);
    if ((double)(count - group->pairs) > DENSE_BELOW * (double)count && costs[0] > WELL_CODED * costs[1])
        group->paired = 1;
    if (!group->exact) {
        uint16_t *table = (uint16_t *)encoder->splits;
        symbols_of_cells(&geometry, lowers, raws, group->bins, table);
        for (int64_t i = 0; i < count; i++)
            symbols[i] = table[symbols[i]];
    }
    costs[0] += 8.0 * (double)(group->plane * count);
    costs[1] += 8.0 * (double)(group->plane * count);
}

/* Plan a group whose pairs are extracted; a dense group becomes sparse if that is smaller. */
static void plan_pairs(
    struct group *group, struct encoder *encoder, int64_t *lowers, uint8_t *raws, uint8_t *lengths, double costs[2]) {
    struct geometry geometry, run_geometry;
    int64_t pairs = group->pairs, longest = 0, largest = 0, counts[SYMBOLS];
    const int64_t *runs = encoder->runs + group->first_pair, *values = encoder->values + group->first_pair;
    uint16_t *joints = encoder->joints + group->first_pair, *run_cells = encoder->run_cells + group->first_pair;
    for (int64_t i = 0; i < pairs; i++) {
        longest |= runs[i];
        largest |= values[i] ^ (values[i] >> 63);
    }
    int64_t top = magnitude_bits(largest), run_top = magnitude_bits(longest);
    int64_t exact = pairs < FEW_ELEMENTS ? EXACT_IF_FEW : EXACT, fine = pairs < FEW_ELEMENTS ? FINE_IF_FEW : FINE;
    int64_t size = set_geometry(top, exact, fine, &geometry);
    int64_t run_size = set_geometry(run_top, exact, fine, &run_geometry);
    int64_t *value_cells = encoder->cells, *cells_of_runs = encoder->cells + size;
    count_cells(values, pairs, top, exact, &geometry, size, value_cells, joints);
    count_cells(runs, pairs, run_top, exact, &run_geometry, run_size, cells_of_runs, run_cells);
    double price = price_of(pairs);
    int64_t pair_lowers[TABLE], run_lowers[SYMBOLS], stride = 8, bins = 8;
    uint8_t pair_raws[TABLE], run_raws[SYMBOLS];
    struct bin_tables of_values = {pair_lowers, pair_raws, counts}, of_runs = {run_lowers, run_raws, counts};
    bins = best_bins(value_cells, &geometry, top, FINEST, price * 4, 0, SYMBOLS / stride, encoder->splits, of_values);
    stride = best_bins(
        cells_of_runs, &run_geometry, run_top, FINEST, price * (double)least(bins, 16), 0, SYMBOLS / bins,
        encoder->splits, of_runs);
    if (stride * bins > SYMBOLS)
        bins = best_bins(
            value_cells, &geometry, top, FINEST, price * 4, 0, SYMBOLS / stride, encoder->splits, of_values);
    memcpy(pair_lowers + bins, run_lowers, (size_t)stride * sizeof *run_lowers);
    memcpy(pair_raws + bins, run_raws, (size_t)stride);
    int64_t symbols = bins * stride;
    uint16_t *table = (uint16_t *)encoder->splits, *run_table = table + size;
    symbols_of_cells(&geometry, pair_lowers, pair_raws, bins, table);
    symbols_of_cells(&run_geometry, run_lowers, run_raws, stride, run_table);
    for (int64_t i = 0; i < pairs; i++)
        joints[i] = (uint16_t)(table[joints[i]] * stride + run_table[run_cells[i]]);
    count_exact(joints, pairs, symbols, 1, encoder->cells);
    struct group planned = *group;
    double pair_costs[2];
    uint8_t pair_lengths[SYMBOLS];
    planned.bins = bins;
    planned.run_bins = stride;
    set_codes(&planned, encoder->cells, true, pair_raws, pair_lengths, pair_costs);
    if (group->kind == DENSE && (1.0 - PAIRS_SHARE) * costs[0] <= pair_costs[0])
        return;
    *group = planned;
    group->kind = SPARSE;
    group->top = top;
    group->run_top = run_top;
    group->exact = 0;
    memcpy(costs, pair_costs, sizeof pair_costs);
    memcpy(lowers, pair_lowers, (size_t)(bins + stride) * sizeof *lowers);
    memcpy(raws, pair_raws, (size_t)(bins + stride));
    memcpy(lengths, pair_lengths, (size_t)symbols);
}

/* Fill `plane`, `exact`, and `top` of the bits above a plane. Return the bytes of all planes. */
static int64_t choose_planes(struct directory *directory, int64_t number, struct encoder *encoder) {
    int64_t bytes = 0;
    for (int64_t index = 0; index < number; index++) {
        struct group *group = &directory->groups[index];
        if (group->kind != DENSE)
            continue;
        if (sample_size(group))
            group->plane = choose_plane(group, encoder);
        group->top = most(group->top - 8 * group->plane, 0);
        group->exact = group->top <= MOST_EXACT && (group->count >> group->top > 0 || group->top <= 6);
        bytes += group->plane * group->count;
    }
    return bytes;
}

/* Choose bins and code lengths of dense groups. Return the number of `paired` groups: groups that have pairs anyway, and
 * groups that pairs might make smaller. The next two steps are for these. */
static int64_t plan_all_dense(struct directory *directory, int64_t number, struct encoder *encoder) {
    int64_t paired = 0;
    for (int64_t index = 0; index < number; index++) {
        struct group *group = &directory->groups[index];
        double *costs = encoder->costs[index];
        costs[0] = 16.0 + (double)group->top;
        costs[1] = 0.0;
        if (group->kind == DENSE)
            plan_dense(
                group, encoder, directory->lowers[index], directory->raws[index], directory->lengths[index], costs);
        paired += group->paired;
    }
    return paired;
}

/* Choose bins and code lengths of `paired` groups; a dense group becomes sparse if that is smaller. */
static void plan_all_pairs(struct directory *directory, int64_t number, struct encoder *encoder) {
    for (int64_t index = 0; index < number; index++)
        if (directory->groups[index].paired)
            plan_pairs(
                &directory->groups[index], encoder, directory->lowers[index], directory->raws[index],
                directory->lengths[index], encoder->costs[index]);
}

/* Return the bytes that one stream may need. */
static int64_t stream_room(const struct directory *directory, int64_t number) {
    int64_t room = 0;
    for (int64_t index = 0; index < number; index++) {
        const struct group *group = &directory->groups[index];
        if (group->kind != EQUAL)
            room += ((group->kind == DENSE ? group->count : group->pairs) / STREAMS + 3) * group->widest;
    }
    return room / 8 + 32;
}
