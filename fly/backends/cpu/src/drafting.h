// A drafter's loop: its forwards one after another, and what each live row drafts and copies. Knows nothing of who verifies.

// The next token of row ``b``, by the logits of the one before, and whether the drafter is sure enough to go on after it.
inline int64_t next_token(Call* call, int b, const float* logits, bool& goes_on) {
    const int vocab = call->model->shape.vocab;
    const int64_t* target = call->model->target;
    const long at = (long)b * call->most + call->drafted_count[b], wide = call->model->tokens;
    const ::fly::Sure& enough = call->sure[b];
    const bool asks = enough.asks();
    float *spread = call->model->work.spread, *distribution = call->sampling ? call->distributions + at * wide : nullptr;
    Surety sure;
    int64_t token;
    if (distribution && call->sampling[b].temperature > 0) {
        const float* own = distribution_of(call->sampling[b], logits, vocab, spread, asks ? &sure : nullptr);
        token = pick(own, vocab, call->uniform[at]);
        if (target) memset(distribution, 0, wide * 4L);
        if (!target) memcpy(distribution, own, vocab * 4L);
        for (int i = 0; target && i < vocab; i++) distribution[target[i]] = own[i];
    } else {
        token = best(logits, vocab);
        constexpr Sampling raw = {1, 1, -__builtin_inff(), 0};
        if (asks) sure = surety(keep(raw, logits, vocab, spread), 1, vocab, spread);
        if (distribution && call->sampling[b].temperature < 0) {
            for (long i = 0; target && i < wide; i++) distribution[i] = -__builtin_inff();
            for (int i = 0; target && i < vocab; i++) distribution[target[i]] = logits[i];
            if (!target) memcpy(distribution, logits, vocab * sizeof(float));
        }
        else if (distribution) memset(distribution, 0, wide * 4L), distribution[target ? target[token] : token] = 1;
    }
    if (asks) {
        const float reached = call->reached[b] *= sure.peak;
        goes_on = sure.peak >= enough.confidence && sure.entropy <= enough.entropy && reached >= enough.reach;
    }
    token = token < 0 ? 0 : token;
    return target ? target[token] : token;
}

// The next forward: of each live row the tokens not stored, and as many copies after them as make for the most tokens
// drafted a second: (1 + a + a·a + ...) over what the forward takes, for copies that stand with a chance of a.
inline void pack(Call* call) {
    Lookup* lookup = call->lookup;
    int tokens = 0, kept = 0, room = MAX_COPIES, forward = 0;  // of the last: its tokens, as far as it is decided
    float expected = call->live_rows;
    for (int i = 0; i < call->live_rows; i++) forward += call->row[i].count;
    for (int i = 0; i < call->live_rows; i++) {
        const int b = call->live_row[i];
        Row& row = call->row[i];
        int32_t* text = call->text[b];
        int copies = 0;
        if (lookup) {
            int most = least_of(call->limit[b] - call->drafted_count[b] - 1, lookup->most);
            // at least one, for what is seen of it
            const int matched = call->matched[i] = look_up(*lookup, text, row.start + row.count, most_of(most, 1));
            most = matched ? least_of(most, room) : 0;
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
    call->rows = call->live_rows, call->tokens = tokens;
    call->token.at = call->live_token, call->position.at = call->live_position;
    call->tile_at = call->tile_tokens = call->piece_count = 0;
    if (tokens) next_tile(call);
}

// What each live row drafts: the next token, and as long as that is the one copied, the one after it.
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
            bool goes_on = true;
            const int64_t token = next_token(call, b, logits, goes_on);
            same = *next == token;
            if (matched && (n < copies || !copies)) {
                float& share = share_of(call->lookup, matched, n);
                share += 0.05f * (same - share);
            }
            *next = (int32_t)token;
            call->drafted[(long)b * call->most + call->drafted_count[b]++] = token;
            row.start++;
            ends = !goes_on || call->drafted_count[b] == call->limit[b];
            for (const int64_t stop : call->stop[b]) ends |= stop == token;
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
            call->given = nullptr;
            advance(call);
        }
        wait(call, false);
    } while (call->live_rows);
}
