/* Kernels of BLAKE3's tree: the values of its nodes, from which several processes compute one digest.
 *
 * The names and constants are those of the BLAKE3 paper, section 2. Eight nodes are computed at once. */
#include "arrays.h"
#include "entropy/words.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { NODES = 8, LEAF = 1024, BLOCK_BYTES = 64, LEAF_START = 1, LEAF_END = 2, PARENT = 4, ROOT = 8 };

typedef uint32_t lanes __attribute__((vector_size(4 * NODES)));

static const uint32_t IV[8] = {
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

#define ROTATED(x, bits) ((x) >> (bits) | (x) << (32 - (bits)))

/* Rotate by whole bytes: `last` is the byte that becomes the first. */
#if defined __AVX2__ && !defined __AVX512VL__
INLINE lanes rotated_bytes(lanes x, const uint8_t last) {
    const __m128i first = _mm_add_epi8(
        _mm_set_epi8(12, 12, 12, 12, 8, 8, 8, 8, 4, 4, 4, 4, 0, 0, 0, 0),
        _mm_and_si128(
            _mm_add_epi8(
                _mm_set_epi8(3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0), _mm_set1_epi8((char)last)),
            _mm_set1_epi8(3)));
    return (lanes)_mm256_shuffle_epi8((__m256i)x, _mm256_broadcastsi128_si256(first));
}
#else
#define rotated_bytes(x, last) ROTATED(x, 8 * (last))
#endif

#define MIX(a, b, c, d, x, y) \
    a += b + (x); d = rotated_bytes(d ^ a, 2); c += d; b = ROTATED(b ^ c, 12); \
    a += b + (y); d = rotated_bytes(d ^ a, 1); c += d; b = ROTATED(b ^ c, 7)

/* Replace the values h by those after a block of words m. */
INLINE void mix_block(
    lanes h[8], const lanes m[16], const uint32_t number[2][NODES], uint32_t nbytes, uint32_t flags) {
    static const uint8_t order[7][16] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
        {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1}, {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
        {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4}, {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
        {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13}};
    const lanes zero = {0};
    lanes v0 = h[0], v1 = h[1], v2 = h[2], v3 = h[3], v4 = h[4], v5 = h[5], v6 = h[6], v7 = h[7];
    lanes v8 = zero + IV[0], v9 = zero + IV[1], v10 = zero + IV[2], v11 = zero + IV[3];
    lanes v12, v13, v14 = zero + nbytes, v15 = zero + flags;
    memcpy(&v12, number[0], sizeof v12);
    memcpy(&v13, number[1], sizeof v13);
    _Pragma("GCC unroll 7")
    for (int round = 0; round < 7; round++) {
        const uint8_t *s = order[round];
        MIX(v0, v4, v8, v12, m[s[0]], m[s[1]]);
        MIX(v1, v5, v9, v13, m[s[2]], m[s[3]]);
        MIX(v2, v6, v10, v14, m[s[4]], m[s[5]]);
        MIX(v3, v7, v11, v15, m[s[6]], m[s[7]]);
        MIX(v0, v5, v10, v15, m[s[8]], m[s[9]]);
        MIX(v1, v6, v11, v12, m[s[10]], m[s[11]]);
        MIX(v2, v7, v8, v13, m[s[12]], m[s[13]]);
        MIX(v3, v4, v9, v14, m[s[14]], m[s[15]]);
    }
    h[0] = v0 ^ v8, h[1] = v1 ^ v9, h[2] = v2 ^ v10, h[3] = v3 ^ v11;
    h[4] = v4 ^ v12, h[5] = v5 ^ v13, h[6] = v6 ^ v14, h[7] = v7 ^ v15;
}

/* Load the words of a block of each lane. */
INLINE void load_blocks(const uint8_t *const bytes[NODES], lanes m[16]) {
#ifdef __AVX2__
    /* The transpose of eight words of eight lanes: pairs of lanes, then four, then all. */
    for (int half = 0; half < 16; half += 8) {
        __m256i rows[NODES], pairs[NODES];
        for (int lane = 0; lane < NODES; lane++)
            rows[lane] = _mm256_loadu_si256((const __m256i *)(bytes[lane] + 4 * half));
        for (int i = 0; i < NODES; i += 2) {
            pairs[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
            pairs[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
        }
        for (int i = 0; i < NODES; i += 4)
            for (int high = 0; high < 2; high++) {
                rows[i + 2 * high] = _mm256_unpacklo_epi64(pairs[i + high], pairs[i + 2 + high]);
                rows[i + 2 * high + 1] = _mm256_unpackhi_epi64(pairs[i + high], pairs[i + 2 + high]);
            }
        for (int i = 0; i < 4; i++) {
            m[half + i] = (lanes)_mm256_permute2x128_si256(rows[i], rows[i + 4], 0x20);
            m[half + 4 + i] = (lanes)_mm256_permute2x128_si256(rows[i], rows[i + 4], 0x31);
        }
    }
#else
#define WORD(lane) *(const unaligned_4 *)(bytes[lane] + 4 * word)
    for (int word = 0; word < 16; word++)
        m[word] = (lanes){WORD(0), WORD(1), WORD(2), WORD(3), WORD(4), WORD(5), WORD(6), WORD(7)};
#undef WORD
#endif
}

INLINE void begin_values(lanes h[8]) {
    const lanes zero = {0};
    for (int i = 0; i < 8; i++)
        h[i] = zero + IV[i];
}

/* Write the values of a few lanes. */
INLINE void store_values(const lanes *h, uint32_t *out, int64_t count) {
    for (int64_t lane = 0; lane < count; lane++)
        for (int i = 0; i < 8; i++)
            out[8 * lane + i] = h[i][lane];
}

int64_t KERNEL(chunk_values)(array bytes, int64_t first, array values) {
    struct view source = input(bytes), target = output(values);
    int64_t count = target.count / 8;
    if (first < 0 || !is_of(&target, U4, count * 8) || !is_of(&source, U1, count * LEAF))
        return MISFIT;
    for (int64_t chunk = 0; chunk < count; chunk += NODES) {
        int64_t left = count - chunk < NODES ? count - chunk : NODES;
        const uint8_t *at[NODES];
        uint32_t numbers[2][NODES];
        lanes h[8], m[16];
        for (int lane = 0; lane < NODES; lane++) {
            int64_t own = chunk + (lane < left ? lane : 0);
            at[lane] = source.data + own * LEAF;
            numbers[0][lane] = (uint32_t)(first + own), numbers[1][lane] = (uint32_t)((uint64_t)(first + own) >> 32);
        }
        begin_values(h);
        for (int block = 0; block < LEAF / BLOCK_BYTES; block++) {
            load_blocks(at, m);
            mix_block(h, m, numbers, BLOCK_BYTES, (block ? 0 : LEAF_START) | (block == LEAF / BLOCK_BYTES - 1 ? LEAF_END : 0));
            for (int lane = 0; lane < NODES; lane++)
                at[lane] += BLOCK_BYTES;
        }
        store_values(h, (uint32_t *)target.data + 8 * chunk, left);
    }
    return 0;
}

/* Compute the values of the nodes above pairs of children, perhaps in the memory of these. */
static void join_pairs(const uint8_t *children, uint32_t *values, int64_t count) {
    for (int64_t node = 0; node < count; node += NODES) {
        int64_t left = count - node < NODES ? count - node : NODES;
        static const uint32_t zeros[2][NODES];
        const uint8_t *at[NODES];
        lanes h[8], m[16];
        for (int lane = 0; lane < NODES; lane++)
            at[lane] = children + (node + (lane < left ? lane : 0)) * BLOCK_BYTES;
        begin_values(h);
        load_blocks(at, m);
        mix_block(h, m, zeros, BLOCK_BYTES, PARENT);
        store_values(h, values + 8 * node, left);
    }
}

int64_t KERNEL(parent_values)(array children, array values) {
    struct view source = input(children), target = output(values);
    int64_t count = target.count / 8;
    if (!is_of(&target, U4, count * 8) || !is_of(&source, U4, count * 16))
        return MISFIT;
    join_pairs(source.data, (uint32_t *)target.data, count);
    return 0;
}

int64_t KERNEL(largest_trees)(array values, int64_t first, array nodes, array levels) {
    struct view leaves = output(values), roots = output(nodes), heights = output(levels);
    int64_t count = leaves.count / 8, most = heights.count, before = 0, after = 0;
    if (first < 0 || most < 128 || heights.type != U1 || !is_of(&roots, U4, most * 8) || !is_of(&leaves, U4, count * 8))
        return MISFIT;
    uint32_t *row = (uint32_t *)leaves.data;
    enum { ROW = 8 * sizeof(uint32_t) };
    /* Trees that end a level lie at the end of `nodes` until all are known. */
    for (uint8_t level = 0; count; level++, first /= 2) {
        if (first & 1) {
            memcpy(roots.data + ROW * before, row, ROW);
            heights.data[before++] = level;
            row += 8, first++, count--;
        }
        if (count & 1) {
            after++;
            memcpy(roots.data + ROW * (most - after), row + 8 * (count - 1), ROW);
            heights.data[most - after] = level;
        }
        count /= 2;
        join_pairs((const uint8_t *)row, row, count);
    }
    memmove(roots.data + ROW * before, roots.data + ROW * (most - after), (size_t)(ROW * after));
    memmove(heights.data + before, heights.data + most - after, (size_t)after);
    return before + after;
}

int64_t KERNEL(root_value)(array bytes, int64_t chunk, array above, array value) {
    struct view source = input(bytes), stack = input(above), target = output(value);
    int64_t nodes = stack.count / 8;
    if (chunk < 0 || source.type != U1 || source.count < 0 || source.count > LEAF || !is_of(&stack, U4, nodes * 8) ||
        !is_of(&target, U4, 8))
        return MISFIT;
    const lanes zero = {0};
    static const uint32_t zeros[2][NODES];
    uint32_t numbers[2][NODES] = {{(uint32_t)chunk}, {(uint32_t)((uint64_t)chunk >> 32)}};
    lanes h[8], m[16];
    begin_values(h);
    int64_t blocks = source.count ? (source.count + BLOCK_BYTES - 1) / BLOCK_BYTES : 1;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t nbytes = source.count - block * BLOCK_BYTES < BLOCK_BYTES ? source.count - block * BLOCK_BYTES : BLOCK_BYTES;
        uint8_t padded[BLOCK_BYTES] = {0};
        memcpy(padded, source.data + block * BLOCK_BYTES, (size_t)nbytes);
        const uint8_t *at[NODES];
        for (int lane = 0; lane < NODES; lane++)
            at[lane] = padded;
        load_blocks(at, m);
        uint32_t flags = (block ? 0 : LEAF_START) | (block == blocks - 1 ? LEAF_END | (nodes ? 0 : ROOT) : 0);
        mix_block(h, m, numbers, (uint32_t)nbytes, flags);
    }
    for (int64_t node = nodes - 1; node >= 0; node--) {
        uint32_t right[8];
        store_values(h, right, 1);
        for (int i = 0; i < 8; i++) {
            m[i] = zero + ((const uint32_t *)stack.data)[8 * node + i];
            m[8 + i] = zero + right[i];
        }
        begin_values(h);
        mix_block(h, m, zeros, BLOCK_BYTES, PARENT | (node ? 0 : ROOT));
    }
    store_values(h, (uint32_t *)target.data, 1);
    return 0;
}
