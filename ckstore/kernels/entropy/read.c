/* Decode planes, streams, and groups without streams into elements in coded order.
 *
 * Every load is checked against the end of the payload before it is made (many loads at once), and every write against
 * the end of its group. Code and raw bits of a damaged payload decode to harmless nonsense; the streams' ends and the
 * checksum reveal it. */
#include "tables.h"

/* Bits of a number without its sign from which no table holds all of it. */
enum { ANY = 31 };

/* Return the bytes of all planes; -1 if the groups do not follow one another from the first element to the last. */
static int64_t planes_bytes(const struct directory *directory, int64_t number, int64_t count, int64_t size) {
    int64_t place = 0, bytes = 0;
    for (int64_t index = 0; index < number; index++) {
        const struct group *group = &directory->groups[index];
        int64_t plane = group->plane;
        bool has_plane = plane == 1 || plane == 2 || plane == 4;
        if (group->start != place || group->count < 0 || group->count > count - place)
            return -1;
        if ((plane && !(has_plane && group->kind == DENSE)) || plane > size)
            return -1;
        if (group->kind < DENSE || group->kind > EQUAL)
            return -1;
        if (group->kind == SPARSE && (group->pairs < 0 || group->pairs > group->count))
            return -1;
        int64_t left = group->count;
        for (int stream = 0; stream < STREAMS && group->kind == SPARSE && has_quarters(group); stream++) {
            if (group->spans[stream] < 0 || group->spans[stream] > left)
                return -1;
            left -= group->spans[stream];
        }
        place += group->count;
        bytes += plane * group->count;
    }
    return place == count ? bytes : -1;
}

/* Fill elements with one value. */
#define FILL(size) \
    for (int64_t i = 0; i < count; i++) \
    store_bytes(coded + size * i, size, value)

static void fill(uint8_t *coded, int64_t size, int64_t count, uint64_t value) {
    if (value)
        WITH_SIZE(size, FILL)
    else
        memset(coded, 0, (size_t)(size * count));
}

/* Decode a group with streams. */
static int64_t read_group(
    const uint8_t *payload, int64_t positions[STREAMS], int64_t limit, const struct directory *directory, int64_t index,
    const uint8_t *plane, uint8_t *coded, int64_t size) {
    const struct group *group = &directory->groups[index];
    struct reader *reader = directory->reader;
    struct symbol *symbols = reader->symbols;
    int64_t longest = fill_symbols(
        group, directory->lowers[index], directory->raws[index], directory->lengths[index], symbols);
    if (longest < 0)
        return DAMAGED;
    bool is_dense = group->kind == DENSE;
    int64_t count = group->bins * group->run_bins, items = is_dense ? group->count : group->pairs;
    bool glanced = size == 1 && group->plane == 0 && items >= GLANCED && are_glanced(symbols, count, reader);
    bool short_pairs = !glanced && group->plane == 0 && are_short(symbols, count, items);
    if (is_dense && group->top <= ANY && !short_pairs && !glanced)
        return read_dense(payload, positions, limit, group, symbols, longest, reader, plane, coded, size);
    uint64_t *codes = reader->numbers, mask = (UINT64_C(1) << longest) - 1;
    fill_table(codes, longest, SYMBOL, symbols, count);
    struct cursor cursors[STREAMS];
    int64_t left = items / STREAMS, at = 0;
    bool quarters = has_quarters(group);
    for (int stream = 0; stream < STREAMS; stream++) {
        int64_t span = !is_dense ? group->spans[stream] : left + (stream < STREAMS - 1 ? 0 : items % STREAMS);
        cursors[stream] = (struct cursor){positions[stream], at, quarters ? at + span : group->count};
        at += quarters ? span : 0;
    }
    int64_t turns = left;
    if (glanced) {
        if (read_bytes(payload, cursors, limit, codes, mask, symbols, &reader->glances, coded))
            return DAMAGED;
    } else if ((!is_dense || short_pairs) &&
               read_pairs(
                   payload, cursors, limit, &left, short_pairs, group, symbols, count, reader->pairs, codes, mask, coded,
                   size))
        return DAMAGED;
    int64_t width = group->plane;
    if (quarters)
        for (int stream = 0; stream < STREAMS; stream++) {
            struct cursor *cursor = &cursors[stream];
            if (read_any(payload, cursor, limit, INT64_MAX, codes, mask, symbols, plane, width, coded, size))
                return DAMAGED;
        }
    else
        for (int64_t i = STREAMS * (turns - left), place = cursors[0].at; i < items; i++) {
            struct cursor *cursor = &cursors[i % STREAMS];
            cursor->at = place;
            if (read_any(payload, cursor, limit, 1, codes, mask, symbols, plane, width, coded, size))
                return DAMAGED;
            place = cursor->at;
        }
    for (int stream = 0; stream < STREAMS; stream++)
        positions[stream] = cursors[stream].position;
    return 0;
}

int64_t KERNEL(reader_bytes)(void) { return sizeof(struct reader); }

int64_t KERNEL(read_streams)(array payload, int64_t planes, const struct directory *directory, int64_t number, array coded) {
    struct view bytes = input(payload), out = output(coded);
    if (!is_of(&bytes, U1, bytes.count) || bytes.count < 0 || out.count < 0 || !is_signed(&out))
        return MISFIT;
    bool streamed = planes > 0;
    int64_t end = streamed ? bytes.count - PADDING : 0;
    int64_t skipped = number < 0 || number > CLASSES ? -1 : planes_bytes(directory, number, out.count, out.size);
    if (skipped < 0 || planes < 0 || planes > end || skipped > end - planes)
        return DAMAGED;
    int64_t place = planes + skipped, limit = streamed ? 8 * end : -1, positions[STREAMS], ends[STREAMS];
    for (int stream = 0; stream < STREAMS; stream++) {
        int64_t here = stream < STREAMS - 1 ? directory->ends[stream] : end - place;
        if (here < 0 || here > end - place)
            return DAMAGED;
        positions[stream] = 8 * place;
        place += here;
        ends[stream] = place;
    }
    const uint8_t *plane = bytes.data + planes;
    for (int64_t index = 0; index < number; index++) {
        const struct group *group = &directory->groups[index];
        uint8_t *target = out.data + out.size * group->start;
        if (group->kind != DENSE)
            fill(target, out.size, group->count, group->kind == EQUAL ? (uint64_t)group->constant : 0);
        if (group->kind == EQUAL)
            continue;
        if (!streamed || read_group(bytes.data, positions, limit, directory, index, plane, target, out.size))
            return DAMAGED;
        plane += group->plane * group->count;
    }
    for (int stream = 0; stream < STREAMS; stream++)
        if ((positions[stream] + 7) >> 3 != ends[stream])
            return DAMAGED;
    return 0;
}

#define WIDEN(to, from) \
    for (int64_t i = 0; i < count; i++) \
    ((to *)target)[i] = ((const from *)source)[i]

static void widen(const void *restrict source, int from, void *restrict target, int to, int64_t count) {
    switch (16 * from + to) {
    case 0x12: WIDEN(int16_t, int8_t); break;
    case 0x14: WIDEN(int32_t, int8_t); break;
    case 0x18: WIDEN(int64_t, int8_t); break;
    case 0x24: WIDEN(int32_t, int16_t); break;
    case 0x28: WIDEN(int64_t, int16_t); break;
    case 0x48: WIDEN(int64_t, int32_t); break;
    default: memcpy(target, source, (size_t)(to * count));
    }
}

int64_t KERNEL(widen)(array narrow, array wide) {
    struct view from = input(narrow), to = output(wide);
    if (from.count < 0 || from.count != to.count || !is_signed(&from) || !is_signed(&to) || from.size > to.size)
        return MISFIT;
    widen(from.data, from.size, to.data, to.size, to.count);
    return 0;
}

#define ADD(from) \
    for (int64_t i = 0; i < count; i++) \
    sums[i] = (int32_t)((uint32_t)((int32_t)((uint32_t)sums[i] + half) >> shift) + (uint32_t)((const from *)numbers)[i])

static void accumulate(const void *restrict numbers, int size, int32_t *restrict sums, int64_t count, int64_t shift) {
    uint32_t half = (UINT32_C(1) << shift) >> 1;
    switch (size) {
    case 1: ADD(int8_t); break;
    case 2: ADD(int16_t); break;
    default: ADD(int32_t); break;
    }
}

int64_t KERNEL(accumulate)(array narrow, array sums, int64_t shift) {
    struct view from = input(narrow), to = output(sums);
    if (from.count < 0 || !is_of(&to, I4, from.count) || !is_signed(&from) || from.size > 4 || shift < 0 || shift > 30)
        return MISFIT;
    accumulate(from.data, from.size, (int32_t *)to.data, to.count, shift);
    return 0;
}

int64_t KERNEL(fill_table)(array table, int64_t bits, int64_t tells, const struct symbol *symbols, int64_t count) {
    struct view entries = output(table);
    if (bits < 0 || bits > 16 || !is_of(&entries, U8, INT64_C(1) << bits))
        return MISFIT;
    if (tells == BY_CODE)
        fill_numbers_long((uint64_t *)entries.data, bits, symbols, count);
    else
        fill_table((uint64_t *)entries.data, bits, tells, symbols, count);
    return 0;
}
