/* Decoders for libFuzzer, with arrays that end where their memory ends: `tests/kernel_fuzzing.py` compiles it.
 *
 * The environment's TARGET names the decoder. */
#include <stdlib.h>

#include "entropy/directory.c"
#include "entropy/lengths.c"
#include "entropy/tables.c"
#include "entropy/read_dense.c"
#include "entropy/read_pairs.c"
#include "entropy/read_bytes.c"
#include "entropy/read.c"
#include "entropy/order.c"
#include "lattice.c"
#include "short_floats.c"
#include "coarse.c"
#include "codebook.c"
#include "patches.c"

enum { HEAD = 16, MOST = 1 << 15, ALL = CONTIGUOUS | ALIGNED | WRITABLE };

struct fake_type {
    char head[HEAD];
    struct type_fields fields;
};
struct fake {
    char head[HEAD];
    struct array_fields fields;
    struct fake_type type;
    intptr_t shape;
};

/* Fill an array of `count` elements with bytes, as many as there are. */
static array make(struct fake *fake, enum type type, int64_t count, const uint8_t *bytes, int64_t length) {
    static const int sizes[] = {0, 1, 1, 2, 2, 4, 4, 8, 8, 8, 8, 4, 8};
    size_t size = (size_t)(count * sizes[type]);
    uint8_t *data = malloc(size ? size : 1);
    memset(data, 0, size);
    if (length > 0 && size)
        memcpy(data, bytes, size < (size_t)length ? size : (size_t)length);
    *fake = (struct fake){.type = {.fields = {.order = '=', .number = type}}, .shape = count};
    fake->fields = (struct array_fields){
        .data = data, .dimensions = 1, .shape = &fake->shape, .type = &fake->type, .flags = ALL};
    return fake;
}

static void release(struct fake *fake) { free(fake->fields.data); }

/* The bytes that are left. */
struct input {
    const uint8_t *bytes;
    int64_t left;
};

static uint64_t take(struct input *from, int count) {
    uint64_t value = 0;
    for (int i = 0; i < count && from->left > 0; i++, from->left--)
        value |= (uint64_t)*from->bytes++ << 8 * i;
    return value;
}

static int64_t take_varint(struct input *from) {
    uint64_t value = 0;
    for (int shift = 0; shift < 63; shift += 7) {
        uint64_t byte = take(from, 1);
        value |= (byte & 127) << shift;
        if (byte < 128)
            break;
    }
    return (int64_t)value;
}

/* A payload, as `integer_header.py` reads it; the classes of its elements are those of its groups, but for the last. */
static void decode_integers(struct input from) {
    static struct group groups[CLASSES];
    static int64_t lowers[CLASSES][TABLE], ends[4];
    static uint8_t raws[CLASSES][TABLE], lengths[CLASSES][SYMBOLS];
    static struct reader reader;
    struct directory directory = {groups, lowers, raws, lengths, ends, &reader};
    const uint8_t *whole = from.bytes;
    int64_t length = from.left;
    if (length < 7)
        return;
    take(&from, 1);
    uint64_t flags = take(&from, 1);
    take(&from, 4);
    uint64_t first = take(&from, 1);
    int64_t count = first < 128 ? (int64_t)take(&from, first < 6 ? (int)first : 6) : INT64_C(1) << (first & 31);
    bool grouped = flags & 16, streamed = flags & 32;
    int width = 1 << (flags & 3), narrow = 1 << (flags >> 2 & 3);
    if (flags > 63 || narrow > width || count > MOST)
        return;
    take(&from, grouped ? 4 : 0);
    int64_t size = from.left, sum = 0;
    if (streamed) {
        size = take_varint(&from);
        for (int i = 0; i < 3; i++)
            ends[i] = take_varint(&from);
        for (int i = 0; i < 4; i++) {
            int64_t part = i < 3 ? ends[i] : size;
            if (part > from.left - 8 - sum)
                return;
            sum += part;
        }
    }
    static const enum type types[] = {I1, I2, I4, I8};
    struct fake payload, coded, classes, natural, wide;
    int64_t begin = length - from.left, planes = begin + size;
    make(&payload, U1, length, whole, length);
    make(&coded, types[flags >> 2 & 3], count, 0, 0);
    make(&classes, U1, count, 0, 0);
    make(&natural, types[flags >> 2 & 3], count, 0, 0);
    make(&wide, types[flags & 3], count, 0, 0);
    int64_t number = KERNEL(read_directory)(&payload, begin, planes, grouped, count, &directory);
    if (number >= 0 && !KERNEL(read_streams)(&payload, streamed ? planes : 0, &directory, number, &coded)) {
        for (int64_t i = 0; i < number; i++)
            memset(classes.fields.data + groups[i].start, (int)groups[i].label, (size_t)groups[i].count);
        if (count)
            classes.fields.data[count - 1] ^= whole[2] & 63;
        KERNEL(to_natural_order)(&coded, &classes, &directory, number, &natural);
        KERNEL(widen)(&natural, &wide);
        if (narrow <= 4) {
            struct fake sums;
            KERNEL(accumulate)(&coded, make(&sums, I4, count, whole, length), whole[3] % 31);
            release(&sums);
        }
    }
    release(&payload), release(&coded), release(&classes), release(&natural), release(&wide);
}

/* Whether elements are floats and the binary logarithm of their size, their number, and a patch. */
static void apply_patch(struct input from) {
    int64_t flags = (int64_t)take(&from, 1), count = (int64_t)take(&from, 2) & (MOST - 1), size = 1 << (flags & 3);
    struct fake payload, bits;
    make(&payload, U1, from.left, from.bytes, from.left);
    KERNEL(apply_patch)(&payload, make(&bits, U1, count * size, from.bytes, from.left), size, flags >> 2 & 1, flags >> 3 & 1);
    release(&payload), release(&bits);
}

/* Values of lattices and codebooks: the integers may be anything, and so may a grid's numbers. */
static void decode_values(struct input from) {
    uint64_t kind = take(&from, 1);
    int64_t count = (int64_t)take(&from, 1), width = (int64_t)take(&from, 1), start = (int64_t)take(&from, 2);
    int64_t down = (int64_t)take(&from, 1), across = kind & 16 ? width : 0, step = (int64_t)take(&from, 8);
    struct fake rows, cols, integers, out;
    make(&rows, I2, down, from.bytes, from.left);
    make(&cols, I2, across, from.bytes + from.left / 2, from.left / 2);
    int64_t shift = (int64_t)take(&from, 1), unit = (int64_t)take(&from, 5), largest = (int64_t)take(&from, 4);
    switch (kind & 7) {
    case 0:
    case 1:
        KERNEL(linear_values)(
            make(&integers, I4, count, from.bytes, from.left), step, &rows, &cols, width, start,
            make(&out, kind & 1 ? F8 : F4, count, 0, 0));
        break;
    case 2:
    case 3:
        KERNEL(rounded_values)(
            make(&integers, I4, count, from.bytes, from.left), shift, unit, step, &rows, &cols, width, start, largest,
            make(&out, kind & 1 ? U4 : U2, count, 0, 0));
        break;
    case 4:
        KERNEL(linear_project)(
            make(&integers, I4, count, from.bytes, from.left), step, &rows, &cols, width, start);
        break;
    case 5:
    case 6:
        make(&integers, U2, count, from.bytes, from.left);
        make(&out, U4, count, 0, 0);
        if (kind & 1)
            KERNEL(from_float16)(&integers, &out);
        else
            KERNEL(from_bfloat16)(&integers, &out);
        break;
    default: {
        struct fake indices, centroids;
        make(&integers, U4, count, from.bytes, from.left);
        make(&indices, U1, count, from.bytes, from.left);
        make(&centroids, F4, (int64_t)width, from.bytes + from.left / 2, from.left / 2);
        KERNEL(add)(&integers, &indices, &centroids, make(&out, U4, count, 0, 0));
        release(&indices), release(&centroids);
    }
    }
    release(&rows), release(&cols), release(&integers), release(&out);
}

static void (*decode)(struct input);

int LLVMFuzzerInitialize(int *count, char ***arguments) {
    (void)count, (void)arguments;
    const char *target = getenv("TARGET");
    start_kernels(HEAD);
    decode = !strcmp(target, "integers") ? decode_integers : !strcmp(target, "patches") ? apply_patch : decode_values;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    decode((struct input){bytes, (int64_t)size});
    return 0;
}
