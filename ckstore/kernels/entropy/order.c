/* Context order: elements stably sorted by class, so that similar elements become neighbours, and back.
 *
 * Four quarters of the elements are sorted at once, each with its own cursors: a cursor's next value waits for its last
 * one, but four cursors do not wait for each other. */
#include "directory.h"
#include "words.h"

/* Stretches that are sorted in parallel; the last one also takes the rest. */
enum { QUARTERS = 4 };

/* See kernels.h. */
static int64_t group_classes(
    const uint8_t *classes, int64_t count, int64_t (*cursors)[256], struct directory *directory) {
    memset(cursors, 0, QUARTERS * sizeof *cursors);
    int64_t quarter = count / QUARTERS;
    for (int64_t i = 0; i < quarter; i++)
        for (int part = 0; part < QUARTERS; part++)
            cursors[part][classes[part * quarter + i]]++;
    for (int64_t i = QUARTERS * quarter; i < count; i++)
        cursors[QUARTERS - 1][classes[i]]++;
    int64_t number = 0, place = 0;
    for (int class = 0; class < 256; class++) {
        int64_t first = place;
        for (int part = 0; part < QUARTERS; part++) {
            int64_t here = cursors[part][class];
            cursors[part][class] = place;
            place += here;
        }
        if (place == first)
            continue;
        if (class >= CLASSES)
            return -1;
        struct group *group = &directory->groups[number++];
        group->label = class;
        group->start = first;
        group->count = place - first;
    }
    return number;
}

int64_t KERNEL(group_classes)(array classes, array cursors, struct directory *directory) {
    struct view from = input(classes), to = output(cursors);
    if (!is_of(&from, U1, from.count) || from.count < 0 || !is_of(&to, I8, QUARTERS * 256))
        return MISFIT;
    return group_classes(from.data, from.count, (int64_t(*)[256])to.data, directory);
}

INLINE void sort_elements(
    const uint8_t *restrict values, const uint8_t *restrict classes, int64_t count, int64_t (*restrict cursors)[256],
    uint8_t *restrict coded, int64_t size) {
    int64_t quarter = count / QUARTERS;
#define PUT(part, i) \
    do { \
        int64_t at = cursors[part][classes[i]]++; \
        memcpy(coded + size * at, values + size * (i), (size_t)size); \
    } while (0)
    for (int64_t i = 0; i < quarter; i++) {
        PUT(0, i);
        PUT(1, quarter + i);
        PUT(2, 2 * quarter + i);
        PUT(3, 3 * quarter + i);
    }
    for (int64_t i = QUARTERS * quarter; i < count; i++)
        PUT(QUARTERS - 1, i);
#undef PUT
}

int64_t KERNEL(to_coded_order)(array values, array classes, array cursors, array coded) {
    struct view from = input(values), by = input(classes), places = output(cursors), to = output(coded);
    if (from.count < 0 || !is_of(&by, U1, from.count) || !is_of(&places, I8, QUARTERS * 256) ||
        !is_of(&to, from.type, from.count))
        return MISFIT;
#define SORT(size) sort_elements(from.data, by.data, from.count, (int64_t(*)[256])places.data, to.data, size)
    WITH_SIZE(from.size, SORT)
#undef SORT
    return 0;
}

/* Each class is read from both ends: the two cursors do not wait for each other, and meet if the counts are right. If
 * not, they run beyond the elements. */
INLINE void restore_order(
    const uint8_t *restrict coded, const uint8_t *restrict classes, int64_t count, int64_t *restrict fronts,
    int64_t *restrict backs, uint8_t *restrict values, int64_t size) {
    int64_t end = count - 1;
    for (int64_t i = 0; i < count >> 1; i++) {
        int64_t opposite = end - i;
        int64_t first = fronts[classes[i]]++, last = --backs[classes[opposite]];
        memcpy(values + size * i, coded + size * least(first, end), (size_t)size);
        memcpy(values + size * opposite, coded + size * most(last, 0), (size_t)size);
    }
    if (count & 1) {
        int64_t first = fronts[classes[count >> 1]]++;
        memcpy(values + size * (count >> 1), coded + size * least(first, end), (size_t)size);
    }
}

int64_t KERNEL(to_natural_order)(
    array coded, array classes, const struct directory *directory, int64_t number, array values) {
    struct view from = input(coded), by = input(classes), to = output(values);
    if (from.count < 0 || !is_of(&by, U1, from.count) || !is_of(&to, from.type, from.count))
        return MISFIT;
    int64_t count = from.count;
    int64_t fronts[256] = {0}, backs[256] = {0};
    if (number < 0 || number > CLASSES)
        return DAMAGED;
    for (int64_t index = 0; index < number; index++) {
        const struct group *group = &directory->groups[index];
        if (group->label < 0 || group->label >= CLASSES || group->start < 0 || group->count < 0 ||
            group->start > count || group->count > count - group->start)
            return DAMAGED;
        fronts[group->label] = group->start;
        backs[group->label] = group->start + group->count;
    }
#define RESTORE(size) restore_order(from.data, by.data, count, fronts, backs, to.data, size)
    WITH_SIZE(from.size, RESTORE)
#undef RESTORE
    return memcmp(fronts, backs, sizeof fronts) ? DAMAGED : 0;
}
