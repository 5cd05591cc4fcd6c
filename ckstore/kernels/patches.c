/* Patches: the elements of a chunk that differ from another's, and their differences.
 *
 * `ckstore.codecs.patches` has the format. Elements are passed as bytes. A payload may be damaged: every place is checked
 * against the chunk, and every load against the payload's end. */
#include "arrays.h"
#include "entropy/words.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum {
    BLOCK = 64,       /* Numbers of one width. */
    BEHIND = 8,       /* Bytes after the last number that a load may touch. */
    CHECKSUM = 4,     /* First byte after the checksum. */
    LOADED = 57,      /* Maximal bits of a number that one load always holds. */
    LONG = 128,       /* Flag of a block's width if it has longer numbers. */
    MOST_SHIFT = 31,  /* Maximal low bits of a Rice code. */
    LONGER_BITS = 16, /* Extra bits of a number that is longer than its block's width; half of it for such a block. */
    VARINT_BITS = 56, /* Bits from which a varint is damaged. */
};

/* Return the order-preserving integer of a float's bits, where `top` is their number less one; keep other bits. */
INLINE uint64_t ordinal_of(uint64_t bits, int64_t top, bool is_float) {
    return is_float ? bits ^ ((0 - (bits >> top)) | UINT64_C(1) << top) : bits;
}

/* Invert `ordinal_of`; bits above `top` are undefined in both. */
INLINE uint64_t bits_of_ordinal(uint64_t ordinal, int64_t top, bool is_float) {
    return is_float ? ordinal ^ (((ordinal >> top & 1) - 1) | UINT64_C(1) << top) : ordinal;
}

/* Return a mask of the `count` bytes, at most 64, that differ, the first in the lowest bit. */
INLINE uint64_t differing(const uint8_t *after, const uint8_t *before, int64_t count) {
    uint64_t mask = 0;
    if (count < 64) {
        for (int64_t i = 0; i < count; i++)
            mask |= (uint64_t)(after[i] != before[i]) << i;
        return mask;
    }
#ifdef __SSE2__
    for (int i = 0; i < 64; i += 16) {
        __m128i now = _mm_loadu_si128((const __m128i *)(after + i)), then = _mm_loadu_si128((const __m128i *)(before + i));
        mask |= (uint64_t)(uint16_t)_mm_movemask_epi8(_mm_cmpeq_epi8(now, then)) << i;
    }
    return ~mask;
#else
    const uint64_t sevens = UINT64_C(0x7F7F7F7F7F7F7F7F);
    for (int i = 0; i < 64; i += 8) {
        /* Bit 7 of each byte that is not 0; the product moves that of byte j to bit 56 + j. */
        uint64_t word = load_word(after + i) ^ load_word(before + i);
        uint64_t flags = (((word & sevens) + sevens) | word) & ~sevens;
        mask |= (flags >> 7) * UINT64_C(0x0102040810204080) >> 56 << i;
    }
    return mask;
#endif
}

INLINE int64_t find_changes_of(
    const uint8_t *after, const uint8_t *before, int64_t bytes, bool is_float, int32_t *places, uint64_t *numbers,
    int64_t size) {
    int64_t count = 0, top = 8 * size - 1, unused = 63 - top;
    uint64_t element = (UINT64_C(1) << size) - 1;
    for (int64_t first = 0; first < bytes; first += 64) {
        uint64_t different = differing(after + first, before + first, least(bytes - first, 64));
        while (different) {
            int64_t byte = __builtin_ctzll(different) / size * size, at = first + byte;
            different &= ~(element << byte);
            uint64_t now = ordinal_of(load_bytes(after + at, size), top, is_float);
            uint64_t then = ordinal_of(load_bytes(before + at, size), top, is_float);
            uint64_t difference = (now - then) << unused, sign = 0 - (difference >> 63);
            numbers[count] = ((((difference ^ sign) - sign) >> unused) - 1) << 1 | (~sign & 1);
            places[count++] = (int32_t)(at / size);
        }
    }
    return count;
}

static bool is_size(int64_t size, int64_t bytes) {
    return (size == 1 || size == 2 || size == 4 || size == 8) && bytes % size == 0;
}

int64_t KERNEL(find_changes)(
    array after, array before, int64_t size, int64_t is_float, array places, array numbers) {
    struct view now = input(after), then = input(before), at = output(places), by = output(numbers);
    if (now.count < 0 || now.type != U1 || !is_of(&then, U1, now.count) || !is_size(size, now.count) || at.type != I4 ||
        by.type != U8 || at.count < now.count / size || by.count < now.count / size)
        return MISFIT;
    int64_t count = 0;
#define FIND(size) \
    count = find_changes_of( \
        now.data, then.data, now.count, is_float, (int32_t *)at.data, (uint64_t *)by.data, size)
    WITH_SIZE(size, FIND)
    return count;
}

static int64_t write_varint(uint8_t *payload, int64_t at, int64_t value) {
    for (; value > 127; value >>= 7)
        payload[at++] = (uint8_t)((value & 127) | 128);
    payload[at++] = (uint8_t)value;
    return at;
}

/* Write the places of elements that are mostly adjacent; return the next byte. */
static int64_t write_runs(const int32_t *places, int64_t count, uint8_t *payload, int64_t at) {
    int64_t end = 0;
    for (int64_t first = 0, last; first < count; first = last) {
        for (last = first + 1; last < count && places[last] == places[last - 1] + 1; last++)
            ;
        at = write_varint(payload, at, places[first] - end);
        at = write_varint(payload, at, last - first - 1);
        end = (int64_t)places[last - 1] + 1;
    }
    return at;
}

/* Write a number of at most 57 bits, and zeros up to the end of a word; return the next bit. */
INLINE int64_t put_bits(uint8_t *payload, int64_t bit, uint64_t value, int64_t bits) {
    uint64_t before = low_bits(payload[bit >> 3], bit & 7);
    store_word(payload + (bit >> 3), before | value << (bit & 7));
    return bit + bits;
}

/* Return the number of elements between the changed element `i` and the one before. */
INLINE int64_t gap_of(const int32_t *places, int64_t i) {
    return places[i] - (i ? (int64_t)places[i - 1] + 1 : 0);
}

/* Return the number of low bits of the shortest Rice codes of the gaps. */
static int64_t best_shift(const int32_t *places, int64_t first, int64_t last) {
    int64_t total = (int64_t)places[last - 1] + 1 - (first ? (int64_t)places[first - 1] + 1 : 0) - (last - first);
    int64_t guess = bit_length((uint64_t)(total / (last - first))), best = 0, fewest = INT64_MAX;
    for (int64_t shift = most(guess - 2, 0); shift <= guess; shift++) {
        int64_t bits = 0;
        for (int64_t i = first; i < last; i++)
            bits += (gap_of(places, i) >> shift) + 1 + shift;
        if (bits < fewest)
            best = shift, fewest = bits;
    }
    return best;
}

/* Write numbers of one width, the gaps of scattered elements, and the high bits of longer numbers. Return the next byte. */
static int64_t write_block(
    const uint64_t *numbers, int64_t first, int64_t last, const int32_t *places, bool is_scattered, uint8_t *payload,
    int64_t at) {
    int64_t lengths[65] = {0}, longest = 0, count = last - first, longer = 0, more = 0, shift = 0;
    for (int64_t i = first; i < last; i++) {
        int64_t length = bit_length(numbers[i]);
        lengths[length]++;
        longest = most(longest, length);
    }
    int64_t width = longest, fewest = width * count;
    for (int64_t shorter = longest - 1; shorter > most(longest - 9, -1); shorter--) {
        more += lengths[shorter + 1];
        int64_t bits = shorter * count + LONGER_BITS * more + LONGER_BITS / 2;
        if (bits < fewest)
            width = shorter, fewest = bits, longer = more;
    }
    payload[at++] = (uint8_t)(width | (longer ? LONG : 0));
    if (is_scattered) {
        shift = best_shift(places, first, last);
        payload[at++] = (uint8_t)shift;
    }
    if (longer)
        payload[at++] = (uint8_t)longer;
    int64_t bit = 8 * at;
    for (int64_t i = first; i < last; i++)
        if (width > 32) {
            bit = put_bits(payload, bit, low_bits(numbers[i], 32), 32);
            bit = put_bits(payload, bit, low_bits(numbers[i] >> 32, width - 32), width - 32);
        } else
            bit = put_bits(payload, bit, low_bits(numbers[i], width), width);
    for (int64_t i = first; is_scattered && i < last; i++)
        bit = put_bits(payload, bit, low_bits((uint64_t)gap_of(places, i), shift), shift);
    for (int64_t i = first; is_scattered && i < last; i++) {
        int64_t zeros = gap_of(places, i) >> shift;
        for (; zeros > 56; zeros -= 56)
            bit = put_bits(payload, bit, 0, 56);
        bit = put_bits(payload, bit, UINT64_C(1) << zeros, zeros + 1);
    }
    at = (bit + 7) >> 3;
    for (int64_t i = first; longer && i < last; i++)
        if (numbers[i] >> width) {
            payload[at++] = (uint8_t)(i - first);
            payload[at++] = (uint8_t)(numbers[i] >> width);
        }
    return at;
}

int64_t KERNEL(write_patch)(array places, array numbers, int64_t count, array payload) {
    struct view at_elements = input(places), by = input(numbers), to = output(payload);
    if (at_elements.type != I4 || by.type != U8 || count < 1 || at_elements.count < count || by.count < count ||
        to.type != U1 || to.count / 19 < count || to.count < 19 * count + 96)
        return MISFIT;
    const int32_t *elements = (const int32_t *)at_elements.data;
    /* The size of the runs is known only after writing them: write them at a place that always fits, then move them. */
    int64_t begin = 32, runs = 1;
    for (int64_t i = 1; i < count; i++)
        runs += elements[i] != elements[i - 1] + 1;
    bool is_scattered = 2 * runs > count;
    int64_t span = is_scattered ? 0 : write_runs(elements, count, to.data, begin) - begin;
    int64_t at = write_varint(to.data, write_varint(to.data, CHECKSUM, count), span);
    memmove(to.data + at, to.data + begin, (size_t)span);
    at += span;
    for (int64_t first = 0; first < count; first += BLOCK) {
        int64_t last = least(first + BLOCK, count);
        at = write_block((const uint64_t *)by.data, first, last, elements, is_scattered, to.data, at);
    }
    store_word(to.data + at, 0);
    return at + BEHIND;
}

/* A payload that is read; `end` is the place of its last eight bytes. If it is undone, differences are subtracted. */
struct patch {
    const uint8_t *bytes;
    int64_t end;
    bool is_undone;
};

/* Numbers of a block, and the elements before each. */
struct block {
    uint64_t numbers[BLOCK];
    int64_t gaps[BLOCK];
};

/* Return a varint and move `at` behind it; move it to -1 if none ends before `end`. */
static int64_t next_varint(const uint8_t *bytes, int64_t *at, int64_t end) {
    int64_t value = 0;
    for (int64_t shift = 0; *at < end && shift < VARINT_BITS; shift += 7) {
        int64_t byte = bytes[(*at)++];
        value |= (byte & 127) << shift;
        if (byte < 128)
            return value;
    }
    *at = -1;
    return 0;
}

/* Add numbers in unary, zeros before a one, to those of `shift` low bits; return the next bit, -1 without ones. */
static int64_t add_high_bits(const struct patch *patch, int64_t bit, int64_t count, int64_t shift, int64_t *gaps) {
    int64_t i = 0, begin = bit;
    while (i < count) {
        if (bit >> 3 > patch->end)
            return -1;
        uint64_t word = load_word(patch->bytes + (bit >> 3)) >> (bit & 7);
        if (!word) {
            bit += LOADED;
            continue;
        }
        for (; word && i < count; word &= word - 1, i++) {
            int64_t one = bit + __builtin_ctzll(word);
            gaps[i] |= (int64_t)((uint64_t)(one - begin) << shift);
            begin = one + 1;
        }
        bit = begin;
    }
    return bit;
}

/* Read `count` differences of at most `limit` bits, and gaps if it is scattered. Return the next byte, -1 for damage. */
static int64_t read_block(
    const struct patch *patch, int64_t at, int64_t count, int64_t limit, bool is_scattered, struct block *block) {
    const uint8_t *bytes = patch->bytes;
    int64_t end = patch->end;
    if (at >= end)
        return -1;
    int64_t width = bytes[at++], shift = is_scattered ? bytes[at++] : 0, longer = width & LONG ? bytes[at++] : 0;
    width &= LONG - 1;
    int64_t bit = 8 * at;
    if (width > limit || shift > MOST_SHIFT || longer > count || (bit + count * width) >> 3 > end)
        return -1;
    uint64_t mask = width == 64 ? UINT64_MAX : low_bits(UINT64_MAX, width);
    if (width <= LOADED)
        for (int64_t i = 0; i < count; i++, bit += width)
            block->numbers[i] = load_word(bytes + (bit >> 3)) >> (bit & 7) & mask;
    else
        for (int64_t i = 0; i < count; i++, bit += width) {
            int64_t place = bit >> 3, skipped = bit & 7;
            uint64_t word = load_word(bytes + place) >> skipped | (uint64_t)bytes[place + 8] << 1 << (63 - skipped);
            block->numbers[i] = word & mask;
        }
    if (is_scattered) {
        if ((bit + count * shift) >> 3 > end)
            return -1;
        for (int64_t i = 0; i < count; i++, bit += shift)
            block->gaps[i] = (int64_t)low_bits(load_word(bytes + (bit >> 3)) >> (bit & 7), shift);
        bit = add_high_bits(patch, bit, count, shift, block->gaps);
        if (bit < 0)
            return -1;
    }
    int64_t behind = (bit + 7) >> 3;
    if (behind + 2 * longer > end)
        return -1;
    for (int64_t i = 0; i < longer; i++, behind += 2) {
        if (bytes[behind] >= count || width > 63)
            return -1;
        block->numbers[bytes[behind]] |= (uint64_t)bytes[behind + 1] << width;
    }
    for (int64_t i = 0; i < count; i++) {
        uint64_t sign = ((block->numbers[i] & 1) ^ patch->is_undone) - 1;
        block->numbers[i] = (((block->numbers[i] >> 1) + 1) ^ sign) - sign;
    }
    return behind;
}

/* Add differences to the ordinals of adjacent elements. */
INLINE void change(uint8_t *elements, bool is_float, const uint64_t *differences, int64_t count, int64_t size) {
    int64_t top = 8 * size - 1;
    for (int64_t i = 0; i < count; i++) {
        uint64_t ordinal = ordinal_of(load_bytes(elements + size * i, size), top, is_float) + differences[i];
        store_bytes(elements + size * i, size, bits_of_ordinal(ordinal, top, is_float));
    }
}

INLINE int64_t apply_patch_of(
    const struct patch *patch, uint8_t *bits, int64_t elements, bool is_float, int64_t size) {
    struct block block = {0};
    int64_t at = CHECKSUM, end = patch->end, element = 0, taken = BLOCK;
    int64_t count = next_varint(patch->bytes, &at, end);
    if (at < 0 || count < 1)
        return DAMAGED;
    int64_t span = next_varint(patch->bytes, &at, end);
    if (at < 0 || span > end - at)
        return DAMAGED;
    int64_t places = at + span, next = places;
    while (span == 0 && count > 0) {
        int64_t many = least(BLOCK, count);
        next = read_block(patch, next, many, 8 * size, true, &block);
        if (next < 0)
            return DAMAGED;
        for (int64_t i = 0; i < many; i++, element++) {
            if (block.gaps[i] < 0 || block.gaps[i] >= elements - element)
                return DAMAGED;
            element += block.gaps[i];
            change(bits + size * element, is_float, block.numbers + i, 1, size);
        }
        count -= many;
    }
    while (count > 0) {
        int64_t gap = next_varint(patch->bytes, &at, places), length = 0;
        if (at >= 0)
            length = next_varint(patch->bytes, &at, places) + 1;
        element += gap;
        if (at < 0 || length > elements - element || length > count)
            return DAMAGED;
        for (int64_t last = element + length; element < last;) {
            if (taken == BLOCK) {
                next = read_block(patch, next, least(BLOCK, count), 8 * size, false, &block);
                if (next < 0)
                    return DAMAGED;
                taken = 0;
            }
            int64_t many = least(BLOCK - taken, last - element);
            change(bits + size * element, is_float, block.numbers + taken, many, size);
            element += many;
            taken += many;
            count -= many;
        }
    }
    return at != places || next != end ? DAMAGED : 0;
}

int64_t KERNEL(apply_patch)(array payload, array bits, int64_t size, int64_t is_float, int64_t is_undone) {
    struct view from = input(payload), to = output(bits);
    if (from.type != U1 || to.type != U1 || to.count < 0 || !is_size(size, to.count))
        return MISFIT;
    struct patch patch = {from.data, from.count - BEHIND, is_undone};
    if (patch.end < CHECKSUM)
        return DAMAGED;
    int64_t status = 0;
#define APPLY(size) status = apply_patch_of(&patch, to.data, to.count / size, is_float, size)
    WITH_SIZE(size, APPLY)
    return status;
}
