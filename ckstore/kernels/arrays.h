/* NumPy's arrays, of which Python passes the address of the object.
 *
 * The fields below are those that every compiled extension reads: NumPy keeps them at these places. */
#ifndef CKSTORE_ARRAYS_H
#define CKSTORE_ARRAYS_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels.h"

/* NumPy's numbers of types. */
enum type { I1 = 1, U1, I2, U2, I4, U4, I8, U8, LONG_LONG, UNSIGNED_LONG_LONG, F4, F8 };

/* What follows the head of Python's object. */
struct array_fields {
    uint8_t *data;
    int dimensions;
    intptr_t *shape, *strides;
    void *base, *type;
    int flags;
};
struct type_fields {
    void *kind_of_object;
    char kind, letter, order, flags;
    int number;
};

/* Flags of arrays. */
enum { CONTIGUOUS = 0x1, ALIGNED = 0x100, WRITABLE = 0x400 };

/* An array's elements. */
struct view {
    uint8_t *data;
    int64_t count;  /* -1 if the array cannot be used: then no check of its size succeeds. */
    enum type type;
    int size;       /* Bytes of an element. */
};

static inline struct view view_with(const void *array, int flags) {
    const struct array_fields *fields = (const void *)((const char *)array + array_head);
    const struct type_fields *type = (const void *)((const char *)fields->type + array_head);
    struct view view = {.data = fields->data, .count = 1, .type = (enum type)type->number};
    if (view.type == LONG_LONG || view.type == UNSIGNED_LONG_LONG)
        view.type = view.type == LONG_LONG ? I8 : U8;
    static const signed char sizes[] = {0, 1, 1, 2, 2, 4, 4, 8, 8, 8, 8, 4, 8};
    view.size = view.type >= I1 && view.type <= F8 ? sizes[view.type] : 0;
    for (int i = 0; i < fields->dimensions; i++)
        view.count *= fields->shape[i];
    if ((fields->flags & flags) != flags || type->order == '>' || !view.size)
        view.count = -1;
    return view;
}

/* Return the elements of an array that is read. */
static inline struct view input(const void *array) { return view_with(array, CONTIGUOUS | ALIGNED); }

/* Return the elements of an array that is written. */
static inline struct view output(const void *array) { return view_with(array, CONTIGUOUS | ALIGNED | WRITABLE); }

/* Return whether a view has a type and a number of elements. */
static inline bool is_of(const struct view *view, enum type type, int64_t count) {
    return view->type == type && view->count == count;
}

static inline bool is_signed(const struct view *view) { return view->type < F4 && (view->type & 1); }
static inline bool is_unsigned(const struct view *view) { return view->type < F4 && !(view->type & 1); }

#endif
