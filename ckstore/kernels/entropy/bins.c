/* Bins that turn signed numbers into symbols: their choice from a histogram, and the histogram's cells.
 *
 * The numbers from -2^top to 2^top - 1 are cut into bins of 2^raw numbers each, and every bin begins at a multiple of its
 * size. A number is coded as the symbol of its bin and `raw` raw bits. Bins are the leaves of a binary tree over the
 * numbers: a node of 2^j numbers is a bin or has two halves. Empty bins have no symbol.
 *
 * Histograms have cells: the numbers of `o` bits without their sign make an octave, of either sign, and each octave has
 * 2^level cells of the same size. All numbers of small octaves have cells of their own. */
#include "directory.h"
#include "logarithms.h"
#include "words.h"

enum { OCTAVES = 64 };

/* Cells by octave, and by sign, 1 for numbers below 0. */
struct geometry {
    int64_t level[OCTAVES];      /* log2 of the octave's cells. */
    int64_t first[2][OCTAVES];   /* Its first cell. */
    int64_t shift[OCTAVES];      /* The right shift of a number, and the offset added to it, that make its cell. */
    int64_t offset[2][OCTAVES];
};

/* Bits that a table of bins grows by where a bin is cut into two. */
static const double SPLIT_BITS = 3.0;

/* Bits of a table of bins. */
struct bin_tables {
    int64_t *lowers;  /* Smallest numbers. */
    uint8_t *raws;    /* Raw bits. */
    int64_t *counts;
};

/* Fill a geometry of numbers of up to `top` bits: every number of at most `exact`, 2^fine cells in larger octaves. Return
 * the number of cells. */
static int64_t set_geometry(int64_t top, int64_t exact, int64_t fine, struct geometry *geometry) {
    int64_t cells = 0;
    for (int64_t place = -top - 1; place <= top; place++) {
        int sign = place < 0;
        int64_t octave = sign ? -place - 1 : place;
        int64_t level = octave <= exact ? most(octave - 1, 0) : least(octave - 1, fine);
        geometry->level[octave] = level;
        geometry->first[sign][octave] = cells;
        geometry->shift[octave] = most(octave - 1, 0) - level;
        int64_t size = INT64_C(1) << level;
        geometry->offset[sign][octave] = sign ? cells + (octave ? 2 * size : 1) : cells - (octave ? size : 0);
        cells += size;
    }
    return cells;
}

/* Return the cell of a number. */
INLINE int64_t cell_of(int64_t number, const struct geometry *geometry) {
    int64_t octave = magnitude_bits(number);
    return geometry->offset[number < 0][octave] + (number >> geometry->shift[octave]);
}

/* Return the bits of the best bins of an octave of 2^level cells, cut at most `deepest` times.
 *
 * Node h of the tree has the halves 2h and 2h + 1; its root is 1. `splits` marks the nodes that are cut. The savings of
 * cuts of nodes with whole bytes of raw bits are added to `losses`. */
static double octave_cost(
    const int64_t *cells, int64_t first, int64_t level, int64_t octave, int64_t deepest, double price, double split_bits,
    uint8_t *splits, double losses[8], int64_t *total) {
    int64_t counts[1 << 11];
    double costs[1 << 11];
    int64_t fold = INT64_C(1) << (level - deepest), raw = most(octave - 1, 0) - deepest;
    *total = 0;
    for (int64_t i = 0; i < INT64_C(1) << deepest; i++) {
        int64_t count = 0;
        for (int64_t cell = first + i * fold; cell < first + (i + 1) * fold; cell++)
            count += cells[cell];
        counts[i] = count;
        costs[i] = count ? (double)(count * raw) - times_log(count) + price : 0.0;
        *total += count;
    }
    uint8_t *root = splits + 2 * first;
    root[1] = 0;
    if (!*total)
        return 0.0;
    for (int64_t depth = deepest - 1; depth >= 0; depth--) {
        raw++;
        for (int64_t i = 0; i < INT64_C(1) << depth; i++) {
            int64_t count = counts[2 * i] + counts[2 * i + 1];
            double cost = 0.0;
            uint8_t split = 0;
            counts[i] = count;
            if (count) {
                cost = (double)(count * raw) - times_log(count) + price;
                double both = costs[2 * i] + costs[2 * i + 1] + split_bits;
                if (both < cost) {
                    if ((raw & 7) == 0)
                        losses[raw >> 3] += cost - both;
                    cost = both;
                    split = 1;
                }
            }
            costs[i] = cost;
            root[(INT64_C(1) << depth) + i] = split;
        }
    }
    return costs[0];
}

/* Find the bins that code a histogram in the fewest bits; return these, with the minimal savings of their symbols.
 *
 * deepest            maximal number of cuts of an octave, at most 11
 * price, split_bits  minimal savings, in bits, of a symbol and of a cut
 * splits             twice the cells: the trees of the octaves, at twice the octave's first cell
 * floors             the octaves, of numbers from 0 on and below 0, up to which all numbers are one bin
 * losses             the bits that bins lose if all have at least one, two, ... bytes of raw bits, as far as cells show */
static double choose_bins(
    const int64_t *cells, const struct geometry *geometry, int64_t top, int64_t deepest, double price, double split_bits,
    uint8_t *splits, int64_t floors[2], double losses[8]) {
    double all_bits = 0.0;
    int64_t total = 0;
    memset(losses, 0, 8 * sizeof *losses);
    for (int sign = 0; sign < 2; sign++) {
        int64_t below = 0;
        double bits = 0.0;
        for (int64_t octave = 0; octave <= top; octave++) {
            int64_t level = geometry->level[octave], count;
            double cost = octave_cost(
                cells, geometry->first[sign][octave], level, octave, least(level, deepest), price, split_bits, splits,
                losses, &count);
            below += count;
            bits += cost + (count ? split_bits : 0.0);
            double all = below ? (double)(below * octave) - times_log(below) + price : 0.0;
            if (all <= bits) {
                bits = all;
                floors[sign] = octave;
            } else if ((octave & 7) == 0)
                losses[octave >> 3] += all - bits;
        }
        all_bits += bits;
        total += below;
    }
    return all_bits + times_log(total);
}

/* List the non-empty bins that `choose_bins` found.
 *
 * With `all_occur`, also list the empty bins, with one more in each count. Return the number of bins; if it exceeds
 * `limit`, the last ones are not written. */
static int64_t list_bins(
    const int64_t *cells, const struct geometry *geometry, int64_t top, int64_t deepest, int64_t all_occur,
    const uint8_t *splits, const int64_t floors[2], struct bin_tables tables, int64_t limit) {
    int64_t bins = 0, cell = 0;
    uint64_t lower = UINT64_MAX << top;
    for (int64_t place = -top - 1; place <= top; place++) {
        int sign = place < 0;
        int64_t octave = sign ? -place - 1 : place;
        if (octave < floors[sign])
            continue;
        bool is_floor = octave == floors[sign];
        int64_t level = geometry->level[octave], cuts = is_floor ? 0 : least(level, deepest);
        const uint8_t *tree = splits + 2 * geometry->first[sign][octave];
        int64_t depth = 0, node = 1;
        while (node) {
            while (depth < cuts && tree[node]) {
                node *= 2;
                depth++;
            }
            int64_t raw = is_floor ? octave : octave - 1 - depth;
            int64_t end = cell + (INT64_C(1) << (level - depth));
            if (is_floor)
                end = sign ? geometry->first[0][0] : geometry->first[0][octave] + (INT64_C(1) << level);
            int64_t count = all_occur;
            for (int64_t i = cell; i < end; i++)
                count += cells[i];
            if (count) {
                if (bins < limit) {
                    tables.lowers[bins] = (int64_t)lower;
                    tables.raws[bins] = (uint8_t)raw;
                    tables.counts[bins] = count;
                }
                bins++;
            }
            cell = end;
            lower += UINT64_C(1) << (raw & 63);
            while (node & 1) {
                node >>= 1;
                depth--;
            }
            node += node > 0;
        }
    }
    return bins;
}

/* Fill a table of symbols by cell. */
static void symbols_of_cells(
    const struct geometry *geometry, const int64_t *lowers, const uint8_t *raws, int64_t bins, uint16_t *table) {
    for (int64_t symbol = 0; symbol < bins; symbol++) {
        int64_t first = cell_of(lowers[symbol], geometry);
        int64_t last = cell_of((int64_t)((uint64_t)lowers[symbol] + (UINT64_C(1) << raws[symbol]) - 1), geometry);
        for (int64_t cell = first; cell <= last; cell++)
            table[cell] = (uint16_t)symbol;
    }
}

int64_t KERNEL(set_geometry)(int64_t top, int64_t exact, int64_t fine, struct geometry *geometry) {
    return set_geometry(top, exact, fine, geometry);
}

int64_t KERNEL(cell_of)(int64_t number, const struct geometry *geometry) { return cell_of(number, geometry); }

int64_t KERNEL(choose_bins)(
    const int64_t *cells, const struct geometry *geometry, int64_t top, int64_t deepest, const double prices[2],
    uint8_t *splits, int64_t floors[2], double losses[8], double *bits) {
    *bits = choose_bins(cells, geometry, top, deepest, prices[0], prices[1], splits, floors, losses);
    return 0;
}

int64_t KERNEL(list_bins)(
    const int64_t *cells, const struct geometry *geometry, int64_t top, int64_t deepest, int64_t all_occur,
    const uint8_t *splits, const int64_t floors[2], int64_t *lowers, uint8_t *raws, int64_t *counts, int64_t limit) {
    struct bin_tables tables = {lowers, raws, counts};
    return list_bins(cells, geometry, top, deepest, all_occur, splits, floors, tables, limit);
}

int64_t KERNEL(symbols_of_cells)(
    const struct geometry *geometry, const int64_t *lowers, const uint8_t *raws, int64_t bins, uint16_t *table) {
    symbols_of_cells(geometry, lowers, raws, bins, table);
    return 0;
}
