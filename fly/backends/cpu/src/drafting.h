// How a drafter drafts a chain, forward by forward (``draft``, at the end of this file). Called by each thread of a call of
// ``fly_draft`` (calls.cpp); between forwards the first thread alone chooses the tokens. Knows nothing of who verifies them.

// Chooses drafted token ``n`` of row ``b`` by its ``logits``. ``peak`` becomes the largest probability, if the draft may stop.
inline int64_t choose(const Call* call, int b, int n, const float* logits, float* spread, float& peak) {
    const int vocab = call->model->shape.vocab;
    const int64_t* target = call->model->target;
    const long at = (long)b * call->most + n, wide = call->model->tokens;
    float* distribution = call->sampling ? call->distributions + at * wide : nullptr;
    int64_t token;
    if (call->raw && call->raw[b].there()) {
        float* raw = call->raw[b] + n * wide;
        for (long i = 0; target && i < wide; i++) raw[i] = -__builtin_inff();
        for (int i = 0; target && i < vocab; i++) raw[target[i]] = logits[i];
        if (!target) memcpy(raw, logits, vocab * sizeof(float));
    }
    if (distribution && call->sampling[b].temperature > 0) {
        const float* own = distribution_of(call->sampling[b], logits, vocab, spread, &peak);
        token = pick(own, vocab, call->uniform[at]);
        if (target) memset(distribution, 0, wide * 4L);
        if (!target) memcpy(distribution, own, vocab * 4L);
        for (int i = 0; target && i < vocab; i++) distribution[target[i]] = own[i];
    } else {
        token = best(logits, vocab);
        constexpr Sampling raw = {1, 1, -__builtin_inff(), 0};
        if (call->stops[b].any()) peak = 1 / keep(raw, logits, vocab, spread).total;
        if (distribution) memset(distribution, 0, wide * 4L), distribution[target ? target[token] : token] = 1;
    }
    token = token < 0 ? 0 : token;
    return target ? target[token] : token;
}

// Adds the next drafted token of row ``b``, which is kept with probability ``chance``. Returns whether drafting goes on after
// it (interface.h: Stops).
inline bool add_token(Call* call, int b, int64_t token, float chance) {
    call->drafted[(long)b * call->most + call->drafted_count[b]++] = token;
    bool goes_on = call->drafted_count[b] < call->limit[b];
    const Stops& stops = call->stops[b];
    if (stops.any()) {
        const float reached = call->reached[b] *= chance;
        goes_on &= chance >= stops.confidence && reached >= stops.reach;
    }
    for (const int64_t stop : call->stop[b]) goes_on &= stop != token;
    return goes_on;
}

// Makes the ``tokens`` that were laid out in the call's own memory those of the next forward.
inline void feed_live(Call* call, int tokens) {
    call->tokens = tokens;
    call->token.at = call->live_token, call->position.at = call->live_position;
    call->tile_at = call->tile_tokens = call->piece_count = 0;
    if (tokens) next_tile(call);
}

// Packs the next forward: for each live row, the tokens that are not stored, then copies of the tokens that a lookup
// found. The number of copies is the one that promises the most drafted tokens a second: if each copy is right with
// probability a, a forward drafts 1 + a + a·a + ... tokens, and ``time_of`` says how long it takes.
inline void pack(Call* call) {
    Lookup* lookup = call->lookup;
    int tokens = 0, kept = 0, room = MAX_COPIES, forward = 0;  // forward: its tokens so far
    float expected = call->live_rows;
    for (int i = 0; i < call->live_rows; i++) forward += call->row[i].count;
    for (int i = 0; i < call->live_rows; i++) {
        const int b = call->live_row[i];
        Row& row = call->row[i];
        int32_t* text = call->text[b];
        int copies = 0;
        if (lookup) {
            int most = min_of(call->limit[b] - call->drafted_count[b] - 1, lookup->most);
            // at least one, to learn the share of right copies
            const int matched = call->matched[i] = look_up(*lookup, text, row.start + row.count, max_of(most, 1));
            most = matched ? min_of(most, room) : 0;
            float stands = 1, reached = expected, best = expected / time_of(*lookup, forward);
            for (int n = 1; n <= most; n++) {
                stands *= share_of(lookup, matched, n - 1);
                reached += stands;
                const float rate = reached / time_of(*lookup, forward + n);
                if (rate > best) best = rate, copies = n, expected = reached;
            }
            forward += copies, room -= copies;
        }
        row.count += copies;
        for (int n = 0; n < row.count; n++, tokens++) {
            call->live_token[tokens] = text[row.start + n];
            call->live_position[tokens] = row.start + n;
        }
        call->kept_at[i] = kept;
        kept += copies + 1;
    }
    call->kept_at[call->live_rows] = kept;
    call->rows = call->live_rows;
    feed_live(call, tokens);
}

// Drafts for each live row: the next token and, as long as it equals the copied one, the token after it.
inline void advance(Call* call) {
    const Model* model = call->model;
    int live = 0;
    for (int i = 0; i < call->live_rows; i++) {
        const int b = call->live_row[i], copies = call->kept_at[i + 1] - call->kept_at[i] - 1;
        const float* logits = model->work.logits + (long)call->kept_at[i] * model->shape.vocab;
        Row row = call->row[i];
        int32_t* next = call->text[b] + row.start + row.count - copies;
        row.start += row.count - copies - 1, row.count = 1;
        const int matched = call->lookup ? call->matched[i] : 0;
        bool ends = false, same = true;
        for (int n = 0; same && !ends && n <= copies; n++, next++, logits += model->shape.vocab) {
            float peak = 1;
            const int64_t token = choose(call, b, call->drafted_count[b], logits, model->work.spread, peak);
            same = *next == token;
            if (matched && (n < copies || !copies)) {
                float& share = share_of(call->lookup, matched, n);
                share += 0.05f * (same - share);
            }
            *next = (int32_t)token;
            row.start++;
            ends = !add_token(call, b, token, peak);
        }
        if (ends) continue;
        call->row[live] = row;
        call->live_row[live] = b;
        call->carried_at[live] = i;
        live++;
    }
    call->live_rows = live;
    pack(call);
}

// The loop: a forward over all live rows, their logits, and the next tokens, until no row goes on.
template <class Wt, class K, class H>
void draft(Call* call, int thread) {
    typename Wt::Act* last = (typename Wt::Act*)call->model->work.last;
    if (!thread) pack(call);
    wait(call);
    do {
        const int64_t begin = nanoseconds();
        tiles<Wt, K, H>(call, thread, last);
        wait(call);
        project<Wt>(call, last, call->kept_at[call->live_rows], call->model->work.logits, thread);
        wait(call);
        if (!thread) {
            if (call->lookup) learn_time(call->lookup, call->tokens, (float)(nanoseconds() - begin));
            call->head_states = nullptr;
            advance(call);
        }
        wait(call, false);
    } while (call->live_rows);
}
