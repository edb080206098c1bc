// Several rounds of speculative decoding in one call: propose, verify, decide, commit. Engine._take_round
// (fly/engine/step.py) takes the same steps, one round at a time.
//
// fly/backends/cpu/rounds.py calls ``fly_rounds`` (at the end of this file) once in a step of the engine. The Python
// interpreter is free meanwhile. A round consists of, in this order:
//
// 1. ``propose``: the drafter drafts for all rows in one call (calls.cpp: fly_draft), or a lookup copies, or both.
// 2. ``score``: one forward of the target over each row's last token and its draft (calls.cpp: fly_score).
// 3. ``decide``: each row's rule decides on its block (decide.cpp), and the target's own token is appended to its text.
// 4. ``commit``: each row's length grows by the emitted tokens, which rolls both KV caches back to them.
//
// Nothing interrupts a round. After a round, ``is_over`` says whether another may follow, and ``decide`` ends the
// series if a row ends or a block stays open. An error in a forward ends the call, and then none of its rounds counts.
//
// Knows nothing of how a model computes its logits.
#include "rounds.h"

using namespace fly;

// Chooses how many tokens each row drafts. Prepares the drafter's first forward or, without a drafter, copies what a
// lookup finds.
void Series::choose_drafts() {
    args->longest = 0;
    draft.clear(drafter ? *draft_batch : *batch);
    for (int b = 0; b < rows; b++) {
        const RoundRow& row = args->row[b];
        const int wanted = most_drafted(row, row.left);
        int most = min_of<int64_t>(wanted, most_within(row));
        if (heads) most = min_of(most, args->head_drafts);
        drafts[b] = 0;
        if (most <= 0) continue;
        if (drafter) {
            // Feed the drafter all tokens that it has not stored. A head is also fed the target's hidden states before
            // them.
            const int i = draft.batch.rows;
            const long known = draft.batch.tokens * state_bytes;
            if (heads) copy(head_states + known, states[b], (row.length - row.draft_start) * state_bytes);
            draft.add(*draft_batch, b, row.text, row.draft_start, row.length, row.first);
            texts[i] = row.copied;
            limit[i] = most, args->longest = max_of(args->longest, heads && lookup ? wanted : most);
        } else if (lookup && target->variant->look_up(*lookup, row.copied, row.length, most)) {
            int64_t* drafted = drafted_of(b);
            for (bool ended = false; drafts[b] < most && !ended; drafts[b]++) {
                const int at = drafts[b];
                drafted[at] = row.text[row.length + at] = row.copied[row.length + at];
                ended = ends(b, drafted[at]);
            }
        }
    }
}

// A lookup beside a head: if it begins as the head's draft for the i-th row that drafts, and copies enough, the row drafts the
// copies (fly/drafts/block.py: LookupDraft). Given the first two, the others are certain. Returns how many tokens the row
// drafts.
int Series::look_beside(int i) {
    constexpr int AGREE = 2;
    const int b = draft.row[i], own = proposed[i];
    const RoundRow& row = args->row[b];
    const int most = min_of<int64_t>(lookup->most, most_drafted(row, row.left));
    if (own <= AGREE || !target->variant->look_up(*lookup, row.copied, row.length, most)) return own;
    const int32_t* copies = row.copied + row.length;
    int64_t* tokens = chain + i * args->longest;
    int n = 0;
    for (bool ended = false; n < most && !ended && copies[n] >= 0 && copies[n] < vocab; n++) ended = ends(b, copies[n]);
    const bool draws = args->rules->sampling.there();
    bool alike = n >= (draws && args->rules->sampling[b].temperature > 0 ? AGREE + 1 : own);
    for (int at = 0; at < AGREE; at++) alike &= copies[at] == tokens[at];
    for (int at = AGREE; alike && at < n; at++) {
        tokens[at] = copies[at];
        if (!draws) continue;
        float* certain = args->distributions + ((long)i * args->longest + at) * vocab;
        memset(certain, 0, vocab * sizeof(float));
        certain[copies[at]] = 1;
    }
    return alike ? n : own;
}

// Proposes tokens for all rows, and writes them after the rows' texts. Returns an error or OK.
int Series::propose() {
    choose_drafts();
    const int drafting_rows = draft.batch.rows;
    if (!drafting_rows) return OK;
    const bool draws = args->rules->sampling.there();
    for (int i = 0; i < drafting_rows; i++) {
        const int b = draft.row[i], length = args->row[b].length;
        stop[i] = args->row[b].stop, stops[i] = args->stops[b];
        raw[i] = args->draft_logits.there() ? args->draft_logits[b] : Span<float>();
        if (!draws) continue;
        // A drafter's coins come from a seed of its own, derived from the row's (fly/ops/random.py: derive).
        const int64_t seed = derived(args->rules->rule[b].seed, length);
        drawing[i] = args->rules->sampling[b];
        for (int n = 0; n < limit[i]; n++) uniforms(seed, length + n, SAMPLE, 1, coins + i * args->longest + n);
    }
    if (const int error = fly_draft(drafter, &draft.batch, args->longest, limit, stop, chain, proposed,
                                    draws ? drawing : Span<Sampling>(), coins, args->distributions, raw, heads ? nullptr : lookup, texts, stops,
                                    head_states))
        return error;
    for (int i = 0; i < drafting_rows; i++) {
        const int b = draft.row[i], n = drafts[b] = heads && lookup ? look_beside(i) : proposed[i];
        RoundRow& row = args->row[b];
        const int64_t* tokens = chain + i * args->longest;
        // The drafter has stored all drafted tokens but the last. What a head stored for its own features is never used
        // again.
        row.draft_start = row.length + (heads ? 0 : n - 1);
        copy(drafted_of(b), tokens, n);
        copy(row.text + row.length, tokens, n);
    }
    return OK;
}

// Feeds the target each row's last token and its draft. Writes logits, the most likely tokens, and hidden states if
// they are asked for. Returns an error or OK.
int Series::score() {
    scored.clear(*batch);
    for (int b = 0; b < rows; b++) {
        const int length = args->row[b].length;
        scored.add(*batch, b, args->row[b].text, length - 1, length + drafts[b]);
    }
    return fly_score(target, &scored.batch, {}, args->logits, choice, args->state, read());
}

// Decides on each row's block. Its accepted tokens are in the row's text already, and the target's own token is put
// after them. Returns whether the series ends: a row has ended or has no room for another round, or a block is open. An
// open block stays as it was drafted.
bool Series::decide() {
    bool over = false;
    for (int b = 0, at = 0, i = 0; b < rows; at += drafts[b] + 1, b++) {
        const RoundRow& row = args->row[b];
        const long block = decider.place(b, args->rounds);
        const bool drafted = i < draft.batch.rows && draft.row[i] == b;
        const float* distributions = drafted ? args->distributions.at : nullptr;
        if (distributions) distributions += (long)i * args->longest * vocab;
        i += drafted;
        blocks->drafted_count[block] = drafts[b];
        memcpy(blocks->choice + block * (k + 1), choice + at, (drafts[b] + 1) * sizeof(int32_t));
        if (heads) states[b] = read() + at * state_bytes;
        decider.decide(b, args->rounds, row.length, row.text, args->logits + (long)at * vocab, distributions);
        if (blocks->following[block] < 0) {
            over = true;
            continue;
        }
        const int n = blocks->accepted[block];
        row.text[row.length + n] = blocks->following[block];
        for (int t = row.length; t <= row.length + n; t++) over |= ends(b, row.text[t]);
        over |= n + 1 >= row.left || row.length + n + 1 + most_drafted(row, row.left - n - 1) > row.room;
    }
    return over;
}

// Whether the time is over, there is no room for the results of another round, or the engine has to hurry.
bool Series::is_over(int64_t elapsed) const {
    return args->rounds == blocks->most || elapsed >= args->nanoseconds ||
           (args->rules->clause.there() && blocks->mismatches + new_tokens > blocks->mismatch.count()) ||
           (args->hurry.there() && __atomic_load_n(args->hurry.at, __ATOMIC_RELAXED));
}

// Makes the emitted tokens part of the rows. Slots of rejected tokens then lie after a row's end, and are overwritten.
void Series::commit() {
    args->read_before += scored.batch.tokens;
    for (int b = 0; b < rows; b++) {
        RoundRow& row = args->row[b];
        const int before = row.length, n = blocks->accepted[decider.place(b, args->rounds - 1)];
        row.length += n + 1, row.left -= n + 1;
        row.draft_start = min_of(row.draft_start, before + n);
        for (int t = before; lookup && t < row.length; t++) row.copied[t] = (int32_t)row.text[t];
    }
}

// Takes rounds for the rows of ``batch``. The target has stored all their tokens but the last. Without a ``drafter``
// and a ``lookup``, rounds draft nothing. ``args`` has the other arguments and receives the results (interface.h:
// Rounds).
EXPORT int fly_rounds(Model* target, const Batch* batch, Model* drafter, const Batch* draft_batch, Lookup* lookup,
                      Rounds* args) {
    const int64_t begin = nanoseconds();
    Series series(args, target, batch, drafter, draft_batch, lookup);
    if (const int error = series.begin()) return error;
    for (int64_t from = begin;;) {
        const bool later = args->rounds > 0;  // the first round's times are counted separately
        // Propose: a draft for each row.
        if (const int error = series.propose()) return error;
        const int64_t proposed = nanoseconds();
        if (drafter || lookup) args->drafting[later] += proposed - from;
        // Verify: one forward of the target.
        if (const int error = series.score()) return error;
        args->scoring[later] += nanoseconds() - proposed;
        // Decide: what each row keeps, and its next token.
        bool over = series.decide();
        args->rounds++;
        const int64_t now = nanoseconds();
        args->elapsed[later] += now - from;
        from = now;
        if (over || series.is_over(now - begin)) return OK;
        // Commit: lengths grow. After the last round, Python does this.
        series.commit();
    }
}
