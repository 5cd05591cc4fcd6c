/* The directory of a payload: its groups, their bins and code lengths, as plain bits.
 *
 * The same functions write and read: a writer's return the given value, a reader's the value read. A reader takes zeros
 * beyond the end of its bytes. */
#include "directory.h"
#include "words.h"

struct bits {
    uint8_t *bytes;    /* A writer's are zeros. */
    int64_t count;     /* In bytes. */
    int64_t position;  /* In bits. */
    bool writes;
};

/* Code the low `count` bits of a number, at most 57, lowest first. */
static uint64_t code_bits(struct bits *bits, int64_t count, uint64_t value) {
    int64_t at = bits->position >> 3, held = bits->position & 7;
    value = low_bits(value, count);
    bits->position += count;
    if (at <= bits->count - 8) {
        uint64_t word = load_word(bits->bytes + at);
        if (!bits->writes)
            return low_bits(word >> held, count);
        store_word(bits->bytes + at, word | value << held);
        return value;
    }
    uint64_t result = 0;
    for (int64_t i = 0; i < count; i++, held = (held + 1) & 7, at += !held) {
        uint64_t bit = bits->writes ? value >> i & 1 : 0;
        if (at < bits->count) {
            if (bits->writes)
                bits->bytes[at] |= (uint8_t)(bit << held);
            else
                bit = bits->bytes[at] >> held & 1;
        }
        result |= bit << i;
    }
    return result;
}

/* Code an unsigned word: seven bits per byte, lowest first; each byte but the last has bit 7 set. */
static uint64_t code_number(struct bits *bits, uint64_t value) {
    uint64_t result = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        uint64_t left = value >> shift, byte = code_bits(bits, 8, (left & 127) | (uint64_t)(left > 127) << 7);
        result |= (byte & 127) << shift;
        if (byte < 128)
            break;
    }
    return result;
}

/* Code `top` and a table of `bins` bins, by their smallest numbers and raw bits. Return the number of bins; 0 for an
 * impossible table, or for more than `room` bins. */
static int64_t code_bins(
    struct bits *bits, int64_t *top, int64_t bins, int64_t room, int64_t *lowers, uint8_t *raws) {
    *top = (int64_t)code_bits(bits, 6, (uint64_t)*top);
    /* Remaining nodes of 2^j numbers, the last one first. */
    int64_t nodes[2 * 64 + 2] = {*top, *top}, left = 2, found = 0, leaves = 0;
    uint64_t lower = UINT64_MAX << *top;
    while (left) {
        int64_t node = nodes[--left];
        uint64_t inside = 0, split = 0;
        if (bits->writes && found < bins) {
            inside = (uint64_t)lowers[found] - lower < UINT64_C(1) << node;
            split = inside && raws[found] < node;
        }
        if (node && code_bits(bits, 1, split)) {
            nodes[left] = nodes[left + 1] = node - 1;
            left += 2;
            continue;
        }
        if (code_bits(bits, 1, inside)) {
            if (found == room)
                return 0;
            lowers[found] = (int64_t)lower;
            raws[found++] = (uint8_t)node;
        }
        if (++leaves > 4 * SYMBOLS)
            return 0;
        lower += UINT64_C(1) << node;
    }
    return found;
}

/* Code the kind of a group and what depends on it; DAMAGED for an impossible group. */
static int64_t code_group(struct bits *bits, struct group *group, int64_t *lowers, uint8_t *raws, uint8_t *lengths) {
    group->kind = (int64_t)code_bits(bits, 2, (uint64_t)group->kind);
    if (!bits->writes)
        group->plane = 0;
    if (group->kind == EQUAL) {
        uint64_t zigzag = (uint64_t)group->constant << 1 ^ (uint64_t)(group->constant >> 63);
        zigzag = code_number(bits, zigzag);
        group->constant = (int64_t)(zigzag >> 1 ^ (0 - (zigzag & 1)));
        return 0;
    }
    if (group->kind > EQUAL)
        return DAMAGED;
    if (group->kind == SPARSE) {
        group->pairs = (int64_t)code_number(bits, (uint64_t)group->pairs);
        if (group->pairs < 0 || group->pairs > group->count)
            return DAMAGED;
        for (int stream = 0; stream < STREAMS && has_quarters(group); stream++)
            group->spans[stream] = (int64_t)code_number(bits, (uint64_t)group->spans[stream]);
    } else
        group->plane = 1 << code_bits(bits, 2, (uint64_t)bit_length((uint64_t)group->plane)) >> 1;
    int64_t bins = code_bins(bits, &group->top, group->bins, TABLE, lowers, raws), stride = 1;
    if (bins > 0 && group->kind == SPARSE)
        stride = code_bins(bits, &group->run_top, group->run_bins, TABLE - bins, lowers + bins, raws + bins);
    int64_t symbols = bins * stride;
    if (symbols < 1 || symbols > SYMBOLS)
        return DAMAGED;
    group->bins = bins;
    group->run_bins = stride;
    if (code_bits(bits, 1, group->single >= 0)) {
        group->single = (int64_t)code_bits(bits, 12, (uint64_t)group->single);
        return group->single < symbols ? 0 : DAMAGED;
    }
    group->single = -1;
    for (int64_t symbol = 0; symbol < symbols; symbol++)
        lengths[symbol] = (uint8_t)code_bits(bits, 4, lengths[symbol]);
    return 0;
}

/* Return the number of groups, -1 for an impossible directory. */
static int64_t code_directory(
    struct bits *bits, bool grouped, int64_t count, int64_t number, struct directory *directory) {
    int64_t start = 0, before = -1;
    number = grouped ? (int64_t)code_bits(bits, 7, (uint64_t)number) : count > 0;
    if (number > CLASSES)
        return -1;
    for (int64_t index = 0; index < number; index++) {
        struct group *group = &directory->groups[index];
        int64_t label = 0, size = count;
        if (grouped) {
            label = (int64_t)code_bits(bits, 6, (uint64_t)group->label);
            size = (int64_t)code_number(bits, (uint64_t)group->count);
        }
        if (label <= before || size < 1 || size > count - start)
            return -1;
        group->label = before = label;
        group->start = start;
        group->count = size;
        start += size;
        if (code_group(bits, group, directory->lowers[index], directory->raws[index], directory->lengths[index]))
            return -1;
    }
    int64_t used = (bits->position + 7) >> 3;
    return start != count || used > bits->count || (used < bits->count && !bits->writes) ? -1 : number;
}

int64_t KERNEL(read_directory)(
    array payload, int64_t begin, int64_t end, int64_t grouped, int64_t count, struct directory *directory) {
    struct view from = input(payload);
    if (from.type != U1 || from.count < 0)
        return MISFIT;
    if (begin < 0 || end < begin || end > from.count || count < 0)
        return -1;
    struct bits bits = {.bytes = from.data + begin, .count = end - begin};
    return code_directory(&bits, grouped, count, 0, directory);
}

int64_t KERNEL(write_directory)(
    array buffer, int64_t grouped, int64_t count, int64_t number, struct directory *directory) {
    struct view to = output(buffer);
    if (to.type != U1 || to.count < 0 || count < 0 || number < 0 || number > CLASSES)
        return MISFIT;
    memset(to.data, 0, (size_t)to.count);
    struct bits bits = {.bytes = to.data, .count = to.count, .writes = true};
    return code_directory(&bits, grouped, count, number, directory) == number ? (bits.position + 7) >> 3 : -1;
}

int64_t KERNEL(code_bits)(struct bits *bits, int64_t count, int64_t value) {
    return (int64_t)code_bits(bits, count, (uint64_t)value);
}

int64_t KERNEL(code_number)(struct bits *bits, int64_t value) { return (int64_t)code_number(bits, (uint64_t)value); }

int64_t KERNEL(code_bins)(struct bits *bits, int64_t *top, int64_t bins, int64_t room, int64_t *lowers, uint8_t *raws) {
    return code_bins(bits, top, bins, room, lowers, raws);
}
