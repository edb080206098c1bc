// The data of several rounds in one call (rounds.cpp): the arguments, which are checked once, and memory for everything
// that a round writes. Knows nothing of the order of the stages.
#pragma once
#include "decide.h"

namespace fly {

// The arrays of a forward over some rows of a batch. Rows are added one by one.
struct Packed {
    Batch batch;
    Span<int32_t> start, count, row;
    Span<int64_t> token, position;
    Span<Span<const int32_t>> tables;

    void take_memory(Dealer& from, int rows, int64_t tokens) {
        start = from.take<int32_t>(rows), count = from.take<int32_t>(rows), row = from.take<int32_t>(rows);
        tables = from.take<Span<const int32_t>>(rows);
        token = from.take<int64_t>(tokens), position = from.take<int64_t>(tokens);
    }

    // Drops all rows. The rows added next are in the KV cache of the batch ``of``.
    void clear(const Batch& of) {
        batch = of;
        batch.start = start, batch.count = count, batch.tables = tables, batch.token = token, batch.position = position;
        batch.rows = batch.tokens = 0;
    }

    // Adds the tokens ``from`` to ``to`` of row ``b`` of the batch ``of``. The model holds no tokens before ``first``.
    void add(const Batch& of, int b, const int64_t* text, int from, int to, int first = 0) {
        const int i = batch.rows++;
        row[i] = b, start[i] = from - first, count[i] = to - from, tables[i] = of.tables[b];
        for (int at = from; at < to; at++) token[batch.tokens] = text[at], position[batch.tokens++] = at - first;
    }
};

// The rounds of one call.
struct Series {
    Rounds* args;
    Blocks* blocks;
    Decider decider;
    Model *target, *drafter;
    const Batch *batch, *draft_batch;
    Lookup* lookup;
    const int rows, vocab, k;
    const bool heads;      // the drafter is a draft head, which needs hidden states
    int new_tokens = 0;    // the most tokens that the target is fed in a round
    long state_bytes = 0;  // bytes of the hidden states of one token; 0 if none are asked for
    Arena arena;
    Packed scored, draft;         // the forwards of the target, and of the drafter
    Span<int32_t> drafts;         // [B] how many tokens each row has drafted in this round
    Span<int32_t> choice;         // the target's most likely tokens
    // For the i-th row that the drafter drafts for: the most tokens to draft, how many it drafted, its coins, and what
    // ends its draft. Drafted tokens of all these rows follow one another in ``chain``.
    Span<int32_t> limit, proposed;
    Span<int64_t> chain;
    Span<float> coins;
    Span<Sampling> drawing;
    Span<Stops> stops;
    Span<Span<const int64_t>> stop;
    Span<Span<const int32_t>> texts;
    Span<Span<float>> raw;
    Span<char> head_states;    // hidden states to feed a draft head
    Span<const char*> states;  // [B] the hidden states of each row's tokens that the head has not stored

    Series(Rounds* rounds, Model* whole, const Batch* of, Model* small, const Batch* draft_of, Lookup* looks)
        : args(rounds), blocks(rounds->blocks), decider(rounds->rules, rounds->blocks), target(whole), drafter(small), batch(of),
          draft_batch(draft_of), lookup(looks), rows(of->rows), vocab(whole->shape.vocab), k(rounds->blocks->k),
          heads(small && small->shape.features) {}

    // Checks that every span holds what rounds read, and has room for what they write. Returns an error or OK.
    int check() const {
        const Shape& shape = target->shape;
        const int64_t wide = k + 1L, places = (int64_t)rows * blocks->most, features = args->state.count() * shape.width;
        if (const int bad = within("rows", rows, 1, MAX_COUNT) ?: within("tokens of a round", rows * wide, 1, MAX_COUNT) ?:
                            within("tokens of the target", target->tokens, vocab, vocab) ?:
                            within("vocab", args->rules->vocab, vocab, vocab) ?: holds("tables", batch->tables, rows) ?:
                            holds("row", args->row, rows) ?: holds("logits", args->logits, rows, wide, vocab) ?:
                            holds_or_none("hurry", args->hurry, 1))
            return bad;
        if (features)
            if (const int bad = holds("read", args->read, places, wide, features, bytes_of_type(shape.hidden))) return bad;
        if (drafter)
            if (const int bad = within("rows of the draft", draft_batch->rows, rows, rows) ?: holds("stops", args->stops, rows) ?:
                                holds("tables of the draft", draft_batch->tables, rows) ?:
                                within("tokens of the drafter", drafter->tokens, 1, vocab) ?:
                                holds_or_none("distributions", args->distributions, rows, k, vocab) ?:
                                holds_or_none("draft_logits", args->draft_logits, rows))
                return bad;
        for (int b = 0; args->draft_logits.there() && b < rows; b++)
            if (const int bad = holds_or_none("draft_logits of a row", args->draft_logits[b], k, vocab)) return bad;
        if (heads)
            if (const int bad = within("features", features, drafter->shape.features, drafter->shape.features) ?:
                                within("their type", shape.hidden, drafter->shape.hidden, drafter->shape.hidden))
                return bad;
        return OK;
    }

    // The same for one row.
    int check(const RoundRow& row) const {
        return within("length", row.length, 1, MAX_COUNT) ?: within("left", row.left, 1, MAX_COUNT) ?: within("k", row.k, 0, k) ?:
               within("room", row.room, row.length + most_drafted(row, row.left), MAX_COUNT) ?:
               holds("text", row.text, row.room + 1L) ?: (lookup ? holds("copied", row.copied, row.room + 1L) : OK) ?:
               within("first", row.first, 0, MAX_COUNT) ?: within("context", row.context, 0, INT32_MAX) ?:
               (drafter ? within("draft_start", row.draft_start, row.first, row.length - 1) : OK);
    }

    // Checks the arguments, sets results to their beginnings, and takes memory. Returns an error or OK.
    int begin() {
        if (const int bad = decider.begin(rows) ?: check()) return bad;
        args->rounds = args->read_before = 0;
        for (int i = 0; i < 2; i++) args->elapsed[i] = args->scoring[i] = args->drafting[i] = 0;
        state_bytes = args->state.count() * target->shape.width * bytes_of_type(target->shape.hidden);
        new_tokens = rows * (k + 1);
        // Over all rows: the tokens of the drafter's first forward, and the most in any forward.
        int64_t behind = 0, fed = 0;
        for (int b = 0; b < rows; b++) {
            const RoundRow& row = args->row[b];
            if (const int bad = check(row)) return bad;
            if (drafter) behind += row.length - row.draft_start, fed += row.length - row.draft_start + k + 1;
        }
        if (const int bad = (heads ? holds("head_states", args->head_states, behind, state_bytes) : OK) ?:
                            lay_out(&arena, "rounds", false, [&](Dealer& from) {
                                scored.take_memory(from, rows, new_tokens), draft.take_memory(from, rows, fed);
                                limit = from.take<int32_t>(rows), drafts = from.take<int32_t>(rows);
                                proposed = from.take<int32_t>(rows), stop = from.take<Span<const int64_t>>(rows);
                                chain = from.take<int64_t>(new_tokens), choice = from.take<int32_t>(new_tokens);
                                coins = from.take<float>(new_tokens);
                                drawing = from.take<Sampling>(rows), stops = from.take<Stops>(rows);
                                texts = from.take<Span<const int32_t>>(rows), states = from.take<const char*>(rows);
                                raw = from.take<Span<float>>(rows);
                                head_states = from.take<char>(heads ? fed : 0, state_bytes);
                            }))
            return bad;
        const char* from = args->head_states;
        for (int b = 0; heads && b < rows; b++) {
            states[b] = from;
            from += (args->row[b].length - args->row[b].draft_start) * state_bytes;
        }
        return OK;
    }

    // The most tokens that a row drafts in its next round, if the row may still emit ``left`` tokens.
    static int64_t most_drafted(const RoundRow& row, int64_t left) { return min_of<int64_t>(row.k, left - 1); }

    // The most tokens to draft after a row, as its context allows. A block, which begins at the last token, needs a position
    // for every place.
    int64_t most_within(const RoundRow& row) const {
        const int64_t most = row.context - row.length;
        const int block = drafter ? drafter->shape.block : 0;
        if (!block) return most;
        return most + 1 < block ? 0 : min_of<int64_t>(most, block - drafter->shape.first);
    }

    // Whether ``token`` ends row ``b``.
    bool ends(int b, int64_t token) const {
        bool is_end = false;
        for (const int64_t id : args->row[b].stop) is_end |= id == token;
        return is_end;
    }

    // The drafted tokens of row ``b``'s block of this round.
    int64_t* drafted_of(int b) const { return blocks->drafted + decider.place(b, args->rounds) * k; }

    // The hidden states of this round's tokens.
    Span<char> read() const {
        const int64_t before = args->read_before * (int64_t)state_bytes;
        return {args->read.at + before, args->read.bytes - before};
    }

    // The stages of a round (rounds.cpp).
    void choose_drafts();
    int look_beside(int i);
    int propose();
    int score();
    bool decide();
    bool is_over(int64_t elapsed) const;
    void commit();
};

}  // namespace fly
