/* Decode dense groups with entries of one type; included for each WORD, with SUFFIXED(name) for the names. */

/* Fill a table of 2^bits entries of the kind BY_CODE. */
static void SUFFIXED(fill_numbers)(WORD *table, int64_t bits, const struct symbol *symbols, int64_t count) {
    uint64_t size = UINT64_C(1) << bits;
    for (int64_t i = 0; i < count; i++) {
        if (symbols[i].length < 0)
            continue;
        WORD length = (WORD)symbols[i].length;
        WORD entry = (WORD)total_bits(&symbols[i]) | length << 8 | (WORD)symbols[i].number << 12;
        uint64_t step = UINT64_C(1) << least(symbols[i].length, bits);
        for (uint64_t slot = (uint64_t)symbols[i].code & (size - 1); slot < size; slot += step)
            table[slot] = entry;
    }
}

/* Take `each` numbers, one or two, from a stream: keep the bits that begin with each, and its entry. */
INLINE uint64_t SUFFIXED(take_turn)(
    const uint8_t *payload, uint64_t position, int64_t each, const WORD *table, uint64_t mask, WORD *words,
    WORD *entries) {
    uint64_t word = load_word(payload + (position >> 3)) >> (position & 7);
    WORD first = table[word & mask];
    words[0] = (WORD)word;
    entries[0] = first;
    if (each == 1)
        return position + (first & 255);
    word >>= first & 63;
    WORD second = table[word & mask];
    words[1] = (WORD)word;
    entries[1] = second;
    return position + (first & 255) + (second & 255);
}

/* Take turns of `each` numbers from every stream; those of a stream are QUARTER apart from those of the next one. */
INLINE void SUFFIXED(take_turns)(
    int64_t turns, int64_t each, const uint8_t *payload, int64_t positions[STREAMS], const WORD *restrict table,
    uint64_t mask, WORD *restrict words, WORD *restrict entries) {
    uint64_t p0 = (uint64_t)positions[0], p1 = (uint64_t)positions[1];
    uint64_t p2 = (uint64_t)positions[2], p3 = (uint64_t)positions[3];
#define TURN(stream, position) \
    SUFFIXED(take_turn)(payload, position, each, table, mask, words + at + QUARTER * stream, entries + at + QUARTER * stream)
    for (int64_t at = 0; at < each * turns; at += each) {
        p0 = TURN(0, p0);
        p1 = TURN(1, p1);
        p2 = TURN(2, p2);
        p3 = TURN(3, p3);
    }
#undef TURN
    positions[0] = (int64_t)p0, positions[1] = (int64_t)p1, positions[2] = (int64_t)p2, positions[3] = (int64_t)p3;
}

/* Take `count` numbers of at most 43 bits, up to QUARTER, from every stream from number `first` on. DAMAGED if one ends
 * too early. */
static int64_t SUFFIXED(take)(
    const uint8_t *payload, int64_t positions[STREAMS], int first, int64_t limit, int64_t widest,
    const WORD *restrict table, uint64_t mask, WORD *restrict words, WORD *restrict entries, int64_t count) {
    int64_t each = widest <= TWICE_LOADED ? 2 : 1, turns = first ? 0 : count / each;
    for (int stream = 0; stream < STREAMS; stream++) {
        /* The last numbers may end beyond the limit: only their load must not begin there. */
        int64_t left = limit - positions[stream];
        turns = least(turns, left < 0 ? 0 : left / most(each * widest, 1) + 1);
    }
    if (each == 2)
        SUFFIXED(take_turns)(turns, 2, payload, positions, table, mask, words, entries);
    else
        SUFFIXED(take_turns)(turns, 1, payload, positions, table, mask, words, entries);
    for (int64_t i = each * turns; i < count; i++)
        for (int stream = first; stream < STREAMS; stream++) {
            int64_t position = positions[stream], at = QUARTER * stream + i;
            if (position > limit)
                return DAMAGED;
            uint64_t word = load_word(payload + (position >> 3)) >> (position & 7);
            WORD entry = table[word & mask];
            words[at] = (WORD)word;
            entries[at] = entry;
            positions[stream] = position + (int64_t)(entry & 255);
        }
    return 0;
}

/* Write the numbers that words begin with, by their entries: their low `width` bytes come from the plane `low`. */
INLINE void SUFFIXED(place_in)(
    const WORD *restrict words, const WORD *restrict entries, int64_t count, const uint8_t *restrict low,
    int64_t width, uint8_t *restrict coded, int64_t size) {
    const WORD last = 8 * sizeof(WORD) - 1;
    for (int64_t i = 0; i < count; i++) {
        /* Shifts of a variable, for GCC does not vectorise those of a constant; none reaches the word's width. */
        WORD total = entries[i] & 255, raw = total - (entries[i] >> 8 & 15);
        WORD number = (WORD)((SIGNED)entries[i] >> 12) + (words[i] << (last - total) << 1 >> 1 >> (last - raw));
        if (width && width < (int64_t)sizeof(WORD))
            number = number << 8 * width | (WORD)load_bytes(low + width * i, width);
        store_bytes(coded + size * i, size, (uint64_t)(SIGNED)number);
    }
}

#define PLACE(size) SUFFIXED(place_in)(words, entries, count, low, 0, coded, size)
#define PLACE_1(size) SUFFIXED(place_in)(words, entries, count, low, 1, coded, size)
#define PLACE_2(size) SUFFIXED(place_in)(words, entries, count, low, 2, coded, size)
#define PLACE_4(size) SUFFIXED(place_in)(words, entries, count, low, 4, coded, size)

static void SUFFIXED(place)(
    const WORD *restrict words, const WORD *restrict entries, int64_t count, const uint8_t *restrict low,
    int64_t width, uint8_t *restrict coded, int64_t size) {
    switch (width) {
    case 0: WITH_SIZE(size, PLACE) break;
    case 1: WITH_SIZE(size, PLACE_1) break;
    case 2: WITH_SIZE(size, PLACE_2) break;
    default: WITH_SIZE(size, PLACE_4) break;
    }
}

#undef PLACE
#undef PLACE_1
#undef PLACE_2
#undef PLACE_4

static int64_t SUFFIXED(read_dense)(
    const uint8_t *payload, int64_t positions[STREAMS], int64_t limit, const struct group *group,
    const struct symbol *symbols, int64_t longest, struct reader *reader, const uint8_t *plane, uint8_t *coded,
    int64_t size) {
    WORD *table = (WORD *)reader->numbers, *words = table + (1 << LONGEST), *entries = words + STREAMS * QUARTER;
    SUFFIXED(fill_numbers)(table, longest, symbols, group->bins);
    int64_t widest = 0, width = group->plane, quarter = group->count / STREAMS;
    for (int64_t i = 0; i < group->bins; i++)
        if (symbols[i].length >= 0)
            widest = most(widest, total_bits(&symbols[i]));
    /* The last stream has up to three numbers more. */
    int64_t more = group->count % STREAMS;
    for (int64_t done = 0; done < quarter + more; done += done < quarter ? least(quarter - done, QUARTER) : more) {
        int first = done < quarter ? 0 : STREAMS - 1;
        int64_t taken = done < quarter ? least(quarter - done, QUARTER) : more;
        if (SUFFIXED(take)(
                payload, positions, first, limit, widest, table, (UINT64_C(1) << longest) - 1, words, entries, taken))
            return DAMAGED;
        for (int stream = first; stream < STREAMS; stream++) {
            int64_t from = QUARTER * stream, to = quarter * stream + done;
            SUFFIXED(place)(words + from, entries + from, taken, plane + width * to, width, coded + size * to, size);
        }
    }
    return 0;
}

#undef WORD
#undef SIGNED
#undef SUFFIXED
