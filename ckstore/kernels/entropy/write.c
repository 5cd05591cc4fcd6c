/* Write symbols and raw bits into four streams: a quarter of the items into each, or items in turn.
 *
 * An item's code and raw bits are one entry: a word with its number of bits in the top byte. If symbols are numbers, an
 * entry comes from a table. Else the raw bits are the lowest bits of the number, and of the zero run of a pair. */
#include "encoder.h"
#include "words.h"

enum {
    WRITABLE_BITS = 56,  /* Maximal bits of an append. */
    APPENDS = 256,       /* Appends of a block, ... */
    MOST_APPENDED = 4,   /* ... and maximal items of an append. */
    HIGH = 56,
};
static const uint64_t LOW = (UINT64_C(1) << HIGH) - 1;

/* A stream: the place of its next bit, and the bits of the byte that contains it. */
struct stream {
    uint64_t place, kept;
};

/* A group's items. Those of a stream are `across` apart, the first ones of the streams `along`. */
struct items {
    const uint16_t *symbols;
    const int64_t *low, *high;  /* Runs and values; of dense groups numbers and numbers. */
    const uint64_t *words;      /* Entries by number; null if symbols are not numbers. */
    const uint64_t *heads;
    int64_t first, count, across, along;
};

INLINE void append(uint8_t *buffer, struct stream *stream, uint64_t entry) {
    uint64_t held = stream->place & 7, bits = entry >> HIGH;
    stream->kept |= (entry & LOW) << held;
    store_word(buffer + (stream->place >> 3), stream->kept);
    stream->place += bits;
    stream->kept >>= (held + bits) & 56;
}

/* Fill by symbol: code | its bits << 16 | raw bits of the run << 24 | those of the value << 32 | all bits << 56. */
static void fill_heads(const struct group *group, const uint8_t *raws, const uint32_t *codes, uint64_t *heads) {
    int64_t symbol = 0;
    for (int64_t value = 0; value < group->bins; value++)
        for (int64_t run = 0; run < group->run_bins; run++, symbol++) {
            uint64_t run_raw = group->kind == SPARSE ? raws[group->bins + run] : 0, raw = raws[value];
            uint64_t bits = (codes[symbol] >> 16) + run_raw + raw;
            heads[symbol] = codes[symbol] | run_raw << 24 | raw << 32 | bits << HIGH;
        }
}

/* Fill a table of entries by number, from the smallest one on. */
static void fill_words(
    const struct group *group, const int64_t *lowers, const uint8_t *raws, const uint32_t *codes, uint64_t *words) {
    for (int64_t symbol = 0; symbol < group->bins; symbol++) {
        uint64_t *at = words + lowers[symbol] + (INT64_C(1) << group->top);
        uint64_t length = codes[symbol] >> 16, raw = raws[symbol];
        uint64_t entry = (codes[symbol] & 0xFFFF) | (length + raw) << HIGH;
        for (uint64_t low = 0; low < UINT64_C(1) << raw; low++)
            at[low] = entry | low << length;
    }
}

/* Return the entry of an item of at most 56 bits. */
INLINE uint64_t entry_of(const struct items *items, int64_t at) {
    uint64_t head = items->heads[items->symbols[at]];
    int64_t run_raw = head >> 24 & 255;
    uint64_t raw = low_bits((uint64_t)items->low[at], run_raw) |
                   low_bits((uint64_t)items->high[at], head >> 32 & 255) << run_raw;
    return (head & 0xFFFF) | head >> HIGH << HIGH | raw << (head >> 16 & 255);
}

/* Fill entries[k][a], of item k of append a, from item `done` of each stream on; the streams take turns in appends. */
static void look_up(
    const struct items *items, int64_t done, int64_t appends, int64_t per, uint64_t (*entries)[APPENDS]) {
    int64_t step = per * items->across, along = items->along;
    for (int64_t k = 0; k < per; k++) {
        uint64_t *row = entries[k];
        int64_t at = items->first + (done + k) * items->across;
        if (items->words)
            for (int64_t a = 0; a < appends; a += STREAMS, at += step)
                for (int i = 0; i < STREAMS; i++)
                    row[a + i] = items->words[items->symbols[at + i * along]];
        else
            for (int64_t a = 0; a < appends; a += STREAMS, at += step)
                for (int i = 0; i < STREAMS; i++)
                    row[a + i] = entry_of(items, at + i * along);
    }
    for (int64_t k = per; k < MOST_APPENDED; k++)
        memset(entries[k], 0, (size_t)appends * sizeof **entries);
}

/* Join the entries of every append into one word and its number of bits. Return the largest of these numbers. */
static uint64_t join(
    uint64_t (*restrict entries)[APPENDS], int64_t appends, uint64_t *restrict words, uint64_t *restrict bits) {
    const uint64_t *e0 = entries[0], *e1 = entries[1], *e2 = entries[2], *e3 = entries[3];
    for (int64_t a = 0; a < appends; a++) {
        uint64_t bits_0 = e0[a] >> HIGH, bits_2 = e2[a] >> HIGH, bits_01 = bits_0 + (e1[a] >> HIGH);
        uint64_t low = (e0[a] & LOW) | (e1[a] & LOW) << bits_0, high = (e2[a] & LOW) | (e3[a] & LOW) << bits_2;
        words[a] = low | high << (bits_01 & 63);
        bits[a] = bits_01 + bits_2 + (e3[a] >> HIGH);
    }
    uint64_t largest = 0;
    for (int64_t a = 0; a < appends; a++)
        largest = bits[a] > largest ? bits[a] : largest;
    return largest;
}

/* Return the number of items that most probably fit one append, by their mean bits; rare long items may not fit. */
static int64_t likely_items(int64_t widest, double mean) {
    int64_t items = least((int64_t)(WRITABLE_BITS / (1.25 * mean + 2.0)), MOST_APPENDED);
    /* No shift of an item may reach 64 bits. */
    while (items > 1 && (items - 1) * widest >= 64)
        items--;
    return items;
}

/* Append a block's words to the four streams in turn. */
static void store(
    uint64_t *restrict words, uint64_t *restrict bits, int64_t appends, uint64_t *restrict at, uint8_t *restrict buffer,
    struct stream streams[STREAMS]) {
    for (int stream = 0; stream < STREAMS; stream++) {
        uint64_t place = streams[stream].place;
        for (int64_t a = stream; a < appends; a += STREAMS) {
            at[a] = place;
            place += bits[a];
        }
        streams[stream].place = place;
    }
    /* From here on `bits` are those of the whole bytes that an append fills, with the kept bits of the one before. */
    for (int64_t a = 0; a < appends; a++) {
        uint64_t held = at[a] & 7;
        words[a] <<= held;
        bits[a] = (bits[a] + held) & 56;
        at[a] >>= 3;
    }
    uint64_t k0 = streams[0].kept, k1 = streams[1].kept, k2 = streams[2].kept, k3 = streams[3].kept;
    for (int64_t a = 0; a < appends; a += STREAMS) {
        k0 |= words[a];
        store_word(buffer + at[a], k0);
        k0 >>= bits[a];
        k1 |= words[a + 1];
        store_word(buffer + at[a + 1], k1);
        k1 >>= bits[a + 1];
        k2 |= words[a + 2];
        store_word(buffer + at[a + 2], k2);
        k2 >>= bits[a + 2];
        k3 |= words[a + 3];
        store_word(buffer + at[a + 3], k3);
        k3 >>= bits[a + 3];
    }
    streams[0].kept = k0, streams[1].kept = k1, streams[2].kept = k2, streams[3].kept = k3;
}

/* Write an item that is too long for an append: code, run and value part for part. */
static void write_parts(const struct items *items, int64_t i, uint8_t *buffer, struct stream *stream) {
    uint64_t head = items->heads[items->symbols[i]];
    uint64_t words[] = {head & 0xFFFF, (uint64_t)items->low[i], (uint64_t)items->high[i]};
    for (int part = 0; part < 3; part++) {
        /* Their bits are eight bits apart. */
        int64_t size = head >> (16 + 8 * part) & 255, first = least(size, 32);
        append(buffer, stream, low_bits(words[part], first) | (uint64_t)first << HIGH);
        append(buffer, stream, low_bits(words[part] >> 32, size - first) | (uint64_t)(size - first) << HIGH);
    }
}

/* Write a group's items. */
static void write_group(
    const struct group *group, const struct items *items, uint8_t *buffer, struct stream streams[STREAMS]) {
    uint64_t entries[MOST_APPENDED][APPENDS], words[APPENDS], bits[APPENDS], starts[APPENDS];
    int64_t safe = least(WRITABLE_BITS / group->widest, MOST_APPENDED);
    int64_t likely = most(likely_items(group->widest, (double)group->bits / (double)items->count), safe), per = likely;
    int64_t quarter = items->count / STREAMS, done = 0;
    while (safe && done < quarter) {
        if (done + per > quarter)
            per = 1;
        int64_t turns = least((quarter - done) / per, APPENDS / STREAMS), appends = STREAMS * turns;
        look_up(items, done, appends, per, entries);
        if (join(entries, appends, words, bits) > WRITABLE_BITS && per > safe) {
            per = safe;
            continue;
        }
        store(words, bits, appends, starts, buffer, streams);
        done += turns * per;
        per = likely;
    }
    for (int stream = 0; stream < STREAMS; stream++) {
        int64_t at = items->first + stream * items->along + done * items->across;
        int64_t end = items->first + (items->across > 1 || stream == STREAMS - 1 ? items->count : quarter * (stream + 1));
        for (; at < end; at += items->across)
            if (items->words)
                append(buffer, &streams[stream], items->words[items->symbols[at]]);
            else
                write_parts(items, at, buffer, &streams[stream]);
    }
}

/* Write the groups that have symbols, stream j into `streams` from byte j * room on. Fill `ends`, also of stream 3. */
static void write_streams(
    const struct directory *directory, int64_t number, struct encoder *encoder, int64_t room) {
    uint64_t heads[SYMBOLS], *words = (uint64_t *)encoder->cells;
    uint32_t codes[SYMBOLS];
    struct stream streams[STREAMS];
    for (int stream = 0; stream < STREAMS; stream++)
        streams[stream] = (struct stream){.place = (uint64_t)(8 * stream * room)};
    for (int64_t index = 0; index < number; index++) {
        const struct group *group = &directory->groups[index];
        int64_t symbols = group->bins * group->run_bins;
        if (group->kind >= EQUAL || group->widest == 0)
            continue;
        memset(codes, 0, (size_t)symbols * sizeof *codes);
        if (group->single < 0)
            canonical_codes(directory->lengths[index], symbols, codes);
        fill_heads(group, directory->raws[index], codes, heads);
        bool quarters = has_quarters(group), is_pair = group->kind == SPARSE;
        int64_t count = is_pair ? group->pairs : group->count;
        struct items items = {
            .symbols = is_pair ? encoder->joints : encoder->symbols,
            .low = is_pair ? encoder->runs : encoder->numbers,
            .high = is_pair ? encoder->values : encoder->numbers,
            .heads = heads,
            .first = is_pair ? group->first_pair : group->start,
            .count = count,
            .across = quarters ? 1 : STREAMS,
            .along = quarters ? count / STREAMS : 1,
        };
        if (!is_pair && group->exact) {
            fill_words(group, directory->lowers[index], directory->raws[index], codes, words);
            items.words = words;
        }
        write_group(group, &items, encoder->streams, streams);
    }
    for (int stream = 0; stream < STREAMS; stream++)
        directory->ends[stream] = (int64_t)((streams[stream].place + 7) >> 3);
}
