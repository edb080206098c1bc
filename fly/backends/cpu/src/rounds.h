// The data of several rounds in one call (rounds.cpp): the arguments, which are checked once, and memory for everything
// that a round writes. Knows nothing of the order of the stages.
#pragma once
#include "decide.h"
#include "trees.h"

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
    int64_t spare = 0;     // slots that a round of trees needs after a row's tokens
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
    Span<char> given;          // hidden states to feed a draft head
    Span<const char*> states;  // [B] the hidden states of each row's tokens that the head has not stored
    Forest forest;             // of trees
    Span<uint8_t> mask;
    Span<Span<const uint8_t>> masks;

    Series(Rounds* rounds, Model* whole, const Batch* of, Model* small, const Batch* draft_of, Lookup* looks)
        : args(rounds), blocks(rounds->blocks), decider(rounds->rules, rounds->blocks), target(whole), drafter(small), batch(of),
          draft_batch(draft_of), lookup(looks), rows(of->rows), vocab(whole->shape.vocab), k(rounds->blocks->k),
          heads(small && small->shape.features) {}

    // Checks that every span holds what rounds read, and has room for what they write. An error or OK.
    int check(const Extent& extent) const {
        const Shape& shape = target->shape;
        const Growth* growth = args->growth;
        const int64_t wide = k + 1L, places = (int64_t)rows * blocks->most, features = args->state.count() * shape.width;
        if (const int bad = within("rows", rows, 1, MAX_COUNT) ?: within("tokens of a round", rows * wide, 1, MAX_COUNT) ?:
                            within("tokens of the target", target->tokens, vocab, vocab) ?:
                            within("vocab", args->rules->vocab, vocab, vocab) ?: holds("tables", batch->tables, rows) ?:
                            holds("row", args->row, rows) ?: holds("logits", args->logits, rows, wide, vocab) ?:
                            holds_or_none("hurry", args->hurry, 1) ?:
                            within("parents", blocks->parent.there(), growth != nullptr, growth != nullptr))
            return bad;
        if (features)
            if (const int bad = holds("read", args->read, places, wide, features, bytes_of_type(shape.hidden))) return bad;
        if (drafter)
            if (const int bad = within("rows of the draft", draft_batch->rows, rows, rows) ?: holds("stops", args->stops, rows) ?:
                                holds("tables of the draft", draft_batch->tables, rows) ?:
                                within("tokens of the drafter", drafter->tokens, 1, vocab) ?:
                                (growth ? OK : holds_or_none("distributions", args->distributions, rows, k, vocab)))
                return bad;
        if (heads)
            if (const int bad = within("features", features, drafter->shape.features, drafter->shape.features) ?:
                                within("their type", shape.hidden, drafter->shape.hidden, drafter->shape.hidden))
                return bad;
        if (growth)
            if (const int bad = within("nodes", growth->nodes, 1, k) ?: within("follow", growth->follow, 1, MAX_COUNT) ?:
                                within("candidates", extent.candidates, 1, MAX_COUNT) ?:
                                within("drafters", drafter != nullptr, 1, 1))
                return bad;
        return OK;
    }

    // The same for one row.
    int check(const RoundRow& row) const {
        return within("length", row.length, 1, MAX_COUNT) ?: within("left", row.left, 1, MAX_COUNT) ?: within("k", row.k, 0, k) ?:
               within("room", row.room, row.length + slots_needed(row, row.left), MAX_COUNT) ?:
               holds("text", row.text, row.room + 1L) ?: (lookup ? holds("copied", row.copied, row.room + 1L) : OK) ?:
               within("first", row.first, 0, MAX_COUNT) ?: within("context", row.context, 0, INT32_MAX) ?:
               (drafter ? within("draft_start", row.draft_start, row.first, row.length - 1) : OK);
    }

    // Checks the arguments, sets results to their beginnings, and takes memory. An error or OK.
    int begin() {
        const Growth* growth = args->growth;
        const Extent extent(growth);
        if (const int bad = decider.begin(rows) ?: check(extent)) return bad;
        args->rounds = args->read_before = 0;
        for (int i = 0; i < 2; i++) args->elapsed[i] = args->scoring[i] = args->drafting[i] = 0;
        state_bytes = args->state.count() * target->shape.width * bytes_of_type(target->shape.hidden);
        new_tokens = rows * (k + 1);
        spare = growth ? max_of<int64_t>(growth->nodes, extent.followed) : 0;
        // Over all rows: the tokens of the drafter's first forward, the most in any forward, and the size of the masks.
        // Then the longest row.
        int64_t behind = 0, fed = 0, seen = 0, room = 0;
        for (int b = 0; b < rows; b++) {
            const RoundRow& row = args->row[b];
            if (const int bad = check(row)) return bad;
            if (drafter) behind += row.length - row.draft_start, fed += row.length - row.draft_start + k + 1;
            room = max_of<int64_t>(room, row.room), seen += row.room;
        }
        if (const int bad = (heads ? holds("given", args->given, behind, state_bytes) : OK) ?:
                            (growth ? forest.make_room(growth, extent, drafter, variants[args->rules->variant], rows, room, fed)
                                    : OK) ?:
                            lay_out(&arena, "rounds", false, [&](Dealer& from) {
                                const int trees = growth ? 1 : 0;
                                scored.take_memory(from, rows, new_tokens), draft.take_memory(from, rows, fed);
                                limit = from.take<int32_t>(rows), drafts = from.take<int32_t>(rows);
                                proposed = from.take<int32_t>(rows), stop = from.take<Span<const int64_t>>(rows);
                                chain = from.take<int64_t>(new_tokens), choice = from.take<int32_t>(new_tokens);
                                coins = from.take<float>(new_tokens);
                                drawing = from.take<Sampling>(rows), stops = from.take<Stops>(rows);
                                texts = from.take<Span<const int32_t>>(rows), states = from.take<const char*>(rows);
                                given = from.take<char>(heads ? fed : 0, state_bytes);
                                mask = from.take<uint8_t>(trees, seen, k + 1L);
                                masks = from.take<Span<const uint8_t>>(trees, rows);
                            }))
            return bad;
        const char* from = args->given;
        for (int b = 0; heads && b < rows; b++) {
            states[b] = from;
            from += (args->row[b].length - args->row[b].draft_start) * state_bytes;
        }
        return OK;
    }

    // Slots that a row's next round needs after its tokens, if the row may still emit ``left`` tokens.
    int64_t slots_needed(const RoundRow& row, int64_t left) const {
        return args->growth ? spare : min_of<int64_t>(row.k, left - 1);
    }

    // Whether ``token`` ends row ``b``.
    bool ends(int b, int64_t token) const {
        bool found = false;
        for (const int64_t id : args->row[b].stop) found |= id == token;
        return found;
    }

    // Row ``b``'s block of this round: its number among all blocks, its tokens, their parents, and its accepted path.
    long block_of(int b) const { return decider.place(b, args->rounds); }
    int64_t* drafted_of(int b) const { return blocks->drafted + block_of(b) * k; }
    int32_t* parents_of(int b) const { return blocks->parent + block_of(b) * k; }
    int32_t* path_of(int b) const { return blocks->path + block_of(b) * k; }

    // The hidden states of this round's tokens.
    Span<char> read() const {
        const int64_t before = args->read_before * (int64_t)state_bytes;
        return {args->read.at + before, args->read.bytes - before};
    }

    // The stages of a round (rounds.cpp).
    void choose_drafts();
    int propose();
    int propose_trees();
    int score();
    bool decide();
    void emit(int b, int at, int tree, int n);
    bool is_over(int64_t elapsed) const;
    void commit();
};

}  // namespace fly
