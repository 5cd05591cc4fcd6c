/* A whole payload: all steps of the encoder while the elements are in the processor's cache. */
#include "encoder.h"
#include "words.h"

/* The first byte of a payload, and its flags. */
enum { FORMAT = 1, GROUPED = 16, STREAMED = 32 };

/* Bytes of the head before the number of elements: format, flags, checksum. */
enum { START = 6 };

INLINE int64_t logarithm(int64_t power) { return bit_length((uint64_t)power) - 1; }

static int64_t varint_bytes(int64_t number) { return (most(bit_length((uint64_t)number), 1) + 6) / 7; }

static uint8_t *put_varint(uint8_t *to, int64_t number) {
    for (; number > 127; number >>= 7)
        *to++ = (uint8_t)(number | 128);
    *to++ = (uint8_t)number;
    return to;
}

/* Return the bytes of a number of elements; powers of two take one. */
static int64_t count_bytes(int64_t count) {
    return count && !(count & (count - 1)) ? 1 : 1 + (bit_length((uint64_t)count) + 7) / 8;
}

static uint8_t *put_count(uint8_t *to, int64_t count) {
    int64_t size = count_bytes(count) - 1;
    *to++ = (uint8_t)(size ? size : count ? 128 + logarithm(count) : 0);
    for (int64_t i = 0; i < size; i++)
        *to++ = (uint8_t)(count >> 8 * i);
    return to;
}

/* Return the bytes that the directory may need: for a bin and the empty ones around it at most 24, for a code length half
 * of one, for the rest of a group below 96. */
static int64_t directory_room(const struct directory *directory, int64_t number) {
    int64_t room = 96 * number + 1;
    for (int64_t index = 0; index < number; index++) {
        const struct group *group = &directory->groups[index];
        if (group->kind != EQUAL)
            room += 24 * (group->bins + group->run_bins) + group->bins * group->run_bins;
    }
    return room;
}

int64_t KERNEL(plan_payload)(
    array coded, int64_t grouped, int64_t number, struct directory *directory, struct encoder *encoder) {
    struct view from = input(coded);
    if (!fits(&from, directory, number, encoder))
        return MISFIT;
    struct facts *facts = &encoder->facts;
    int64_t bits = survey_groups(&from, directory, number, encoder);
    facts->narrow = bits <= 7 ? 1 : bits <= 15 ? 2 : bits <= 31 ? 4 : 8;
    facts->planes = choose_planes(directory, number, encoder);
    take_numbers(&from, directory, number, encoder);
    if (plan_all_dense(directory, number, encoder)) {
        extract_pairs(&from, directory, number, encoder);
        plan_all_pairs(directory, number, encoder);
    }
    facts->differs = facts->streamed = 0;
    for (int64_t index = 0; index < number; index++) {
        facts->streamed |= directory->groups[index].kind < EQUAL;
        facts->differs |= directory->groups[index].kind < EQUAL || directory->groups[index].constant;
    }
    int64_t room = directory_room(directory, number), size = START + count_bytes(from.count) + 4 * (grouped != 0);
    if (room > DIRECTORY_BYTES)
        return MISFIT;
    memset(encoder->directory, 0, (size_t)room);
    struct bits written = {.bytes = encoder->directory, .count = room, .writes = true};
    code_directory(&written, grouped, from.count, number, directory);
    facts->directory = (written.position + 7) >> 3;
    size += facts->directory + facts->planes;
    facts->room = stream_room(directory, number);
    facts->size = size;
    if (!facts->streamed)
        return size;
    if (STREAMS * facts->room > STREAM_BYTES * encoder->capacity + STREAM_SPARE)
        return MISFIT;
    write_streams(directory, number, encoder, facts->room);
    size += varint_bytes(facts->directory) + PADDING;
    for (int stream = 0; stream < STREAMS; stream++) {
        int64_t bytes = directory->ends[stream] - stream * facts->room;
        size += bytes + (stream < STREAMS - 1 ? varint_bytes(bytes) : 0);
    }
    return facts->size = size;
}

#define NARROW(from, to) \
    for (int64_t i = 0; i < count; i++) \
    ((to *)target)[i] = (to)((const from *)source)[i]

static void narrow(const void *restrict source, int from, void *restrict target, int to, int64_t count) {
    switch (16 * from + to) {
    case 0x21: NARROW(int16_t, int8_t); break;
    case 0x41: NARROW(int32_t, int8_t); break;
    case 0x42: NARROW(int32_t, int16_t); break;
    case 0x81: NARROW(int64_t, int8_t); break;
    case 0x82: NARROW(int64_t, int16_t); break;
    case 0x84: NARROW(int64_t, int32_t); break;
    default: memcpy(target, source, (size_t)(to * count));
    }
}

int64_t KERNEL(narrow)(array wide, array narrowed) {
    struct view from = input(wide), to = output(narrowed);
    if (from.count < 0 || from.count != to.count || !is_signed(&from) || !is_signed(&to) || from.size < to.size)
        return MISFIT;
    narrow(from.data, from.size, to.data, to.size, to.count);
    return 0;
}

int64_t KERNEL(write_payload)(
    array coded, int64_t grouped, int64_t classes_check, const struct directory *directory,
    const struct encoder *encoder, array payload) {
    struct view from = input(coded), to = output(payload);
    const struct facts *facts = &encoder->facts;
    if (from.count < 0 || !is_signed(&from) || !is_of(&to, U1, facts->size))
        return MISFIT;
    uint8_t *at = to.data;
    *at++ = FORMAT;
    *at++ = (uint8_t)(logarithm(from.size) | logarithm(facts->narrow) << 2 | (grouped ? GROUPED : 0) |
                      (facts->streamed ? STREAMED : 0));
    memset(at, 0, 4);
    at = put_count(at + 4, from.count);
    for (int i = 0; i < 4 && grouped; i++)
        *at++ = (uint8_t)(classes_check >> 8 * i);
    const int64_t *ends = directory->ends;
    if (facts->streamed) {
        at = put_varint(at, facts->directory);
        for (int stream = 0; stream < STREAMS - 1; stream++)
            at = put_varint(at, ends[stream] - stream * facts->room);
    }
    memcpy(at, encoder->directory, (size_t)facts->directory);
    at += facts->directory;
    memcpy(at, encoder->planes, (size_t)facts->planes);
    at += facts->planes;
    for (int stream = 0; stream < STREAMS && facts->streamed; stream++) {
        int64_t bytes = ends[stream] - stream * facts->room;
        memcpy(at, encoder->streams + stream * facts->room, (size_t)bytes);
        at += bytes;
    }
    if (facts->streamed)
        memset(at, 0, PADDING);
    return 0;
}
