/* The encoder's input from elements in coded order: facts about groups, numbers to be coded, zero runs.
 *
 * Only these kernels read the elements in their own width. Planning and writing work on numbers and runs of 64 bits, and
 * symbols of 16. */
#include "encoder.h"
#include "words.h"

/* Share of zeros up to which only symbols of single elements are tried; and from which only joint symbols are: they save
 * at least 5 %. From the one in between on, where zeros may lie together, both are. */
static const double DENSE_BELOW = 0.1, BOTH_ABOVE = 0.5, SPARSE_ABOVE = 0.64;

enum {
    PLANED_FROM = 1024,  /* Minimal number of elements of a group that may have a plane. */
    SAMPLE_BLOCK = 32,
    SAMPLE_SHARE = 16,
    SAMPLE_LEAST = 1024,
    SAMPLE_MOST = 4096,
};

/* Return the number of elements that `survey_groups` samples, a multiple of SAMPLE_BLOCK; 0 without planes. */
static int64_t sample_size(const struct group *group) {
    int64_t count = group->count;
    if (group->kind != DENSE || group->top < 7 || count < PLANED_FROM ||
        (double)(count - group->pairs) > DENSE_BELOW * (double)count)
        return 0;
    return least(most(count / SAMPLE_SHARE, SAMPLE_LEAST), SAMPLE_MOST) / SAMPLE_BLOCK * SAMPLE_BLOCK;
}

#define ELEMENT int8_t
#define SUFFIXED(name) name##_1
#include "survey_of.h"
#define ELEMENT int16_t
#define SUFFIXED(name) name##_2
#include "survey_of.h"
#define ELEMENT int32_t
#define SUFFIXED(name) name##_4
#include "survey_of.h"
#define ELEMENT int64_t
#define SUFFIXED(name) name##_8
#include "survey_of.h"

/* Return whether the groups lie in `coded`, and the encoder has room for as many elements. */
static bool fits(
    const struct view *coded, const struct directory *directory, int64_t number, const struct encoder *encoder) {
    if (coded->count < 0 || coded->count > encoder->capacity || !is_signed(coded) || number < 0 || number > CLASSES)
        return false;
    for (int64_t index = 0; index < number; index++) {
        const struct group *group = &directory->groups[index];
        if (group->start < 0 || group->count < 1 || group->start > coded->count - group->count)
            return false;
    }
    return true;
}

/* Fill `pairs` (the non-zeros), `top`, `kind`, `paired`, and `constant` of groups of equal elements. A dense group may
 * still turn out sparse. Evenly spaced blocks of groups that may have planes become `numbers`, at the group's first
 * element. Return the bits of the largest element without its sign. */
static int64_t survey_groups(
    const struct view *coded, struct directory *directory, int64_t number, struct encoder *encoder) {
    int64_t largest = 0;
    for (int64_t index = 0; index < number; index++) {
        struct group *group = &directory->groups[index];
        const void *elements = coded->data + coded->size * group->start;
        int64_t count = group->count, *numbers = encoder->numbers + group->start;
        bool equal;
#define SURVEY(size) survey_##size(elements, group, &equal)
        WITH_SIZE(coded->size, SURVEY)
        largest = most(largest, group->top);
        double zeros = (double)(count - group->pairs);
        group->paired = !equal && zeros >= BOTH_ABOVE * (double)count;
        group->plane = 0;
        if (equal) {
            group->kind = EQUAL;
            int64_t unused = 64 - 8 * coded->size;
            group->constant = (int64_t)(load_bytes(elements, coded->size) << unused) >> unused;
        } else if (zeros >= SPARSE_ABOVE * (double)count)
            group->kind = SPARSE;
        else {
            group->kind = DENSE;
#define SAMPLE(size) sample_##size(elements, group, numbers)
            WITH_SIZE(coded->size, SAMPLE)
        }
    }
    return largest;
}

/* Split the elements of dense groups: planes one after the other into `planes`, the other bits into `symbols`, counted
 * from the smallest number on, if the group is `exact`; else into `numbers`. */
static void take_numbers(
    const struct view *coded, const struct directory *directory, int64_t number, struct encoder *encoder) {
    int64_t at = 0;
    for (int64_t index = 0; index < number; index++) {
        const struct group *group = &directory->groups[index];
        if (group->kind != DENSE)
            continue;
        const void *elements = coded->data + coded->size * group->start;
        uint16_t *symbols = encoder->symbols + group->start;
        int64_t *numbers = encoder->numbers + group->start;
#define TAKE(size) take_##size(elements, group, symbols, numbers, encoder->planes + at)
        WITH_SIZE(coded->size, TAKE)
        at += group->plane * group->count;
    }
}

/* Write the zero run before every non-zero, and its value, of the `paired` groups; fill `first_pair`. */
static void extract_pairs(
    const struct view *coded, struct directory *directory, int64_t number, struct encoder *encoder) {
    int64_t pair = 0;
    for (int64_t index = 0; index < number; index++) {
        struct group *group = &directory->groups[index];
        if (!group->paired)
            continue;
        group->first_pair = pair;
        const void *elements = coded->data + coded->size * group->start;
        int64_t *runs = encoder->runs + pair, *values = encoder->values + pair, count = group->count;
#define EXTRACT(size) pair += extract_##size(elements, count, runs, values)
        WITH_SIZE(coded->size, EXTRACT)
        int64_t quarter = group->pairs / STREAMS;
        for (int stream = 0; stream < STREAMS; stream++) {
            int64_t end = stream < STREAMS - 1 ? quarter * (stream + 1) : group->pairs, length = 0;
            for (int64_t i = quarter * stream; i < end; i++)
                length += runs[i] + 1;
            group->spans[stream] = length;
        }
    }
}
