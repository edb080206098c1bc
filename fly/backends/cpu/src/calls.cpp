// Calls of a packed model: forwards, logits, drafts. Called from Python (packed.py, executor.py, drafting.py, head.py)
// and by rounds (rounds.cpp). A call checks its arguments before it writes anything, and makes room in the
// model's workspace, which it holds alone until it ends. It runs on the pool's threads (threads.cpp). Nothing
// interrupts it. Knows nothing of the arithmetic.
#include "library.h"

using namespace fly;

namespace {

// Slots that a call takes after a row's new tokens: those of a block, or of the drafted tokens but the last. ``limit`` [B] is
// the most tokens to draft, or null.
int ahead_of(const Model* model, Job job, const int32_t* limit, int b) {
    if (model->shape.block) return job == PLACES || job == DRAFT ? model->shape.block : 0;
    return limit ? limit[b] - 1 : 0;
}

// Checks that a batch's tokens are in the vocabulary, its positions in the context, and its pages in the cache. The
// pages must have room for the new tokens, and for ``ahead_of`` ones after them. Returns an error or OK.
int check(const Model* model, Job job, const Batch* batch, const int32_t* limit) {
    const Shape& shape = model->shape;
    const int rows = batch->rows, page = batch->page;
    const long each = (long)shape.kv_heads * shape.head_dim, cached = bytes_of_type(batch->cache_type);
    if (const int error = within("rows", rows, 0, MAX_COUNT) ?: within("tokens", batch->tokens, 0, MAX_COUNT) ?:
                          within("cache_type", batch->cache_type, FLOAT32, BFLOAT16) ?: within("page", page, 1, MAX_COUNT) ?:
                          holds("token", batch->token, batch->tokens) ?: holds("position", batch->position, batch->tokens) ?:
                          holds("start", batch->start, rows) ?: holds("count", batch->count, rows) ?:
                          holds("tables", batch->tables, rows) ?: within("layer_stride", batch->layer_stride, 0, BEYOND) ?:
                          holds("keys", batch->keys, shape.layers, batch->layer_stride, cached) ?:
                          holds("values", batch->values, shape.layers, batch->layer_stride, cached) ?:
                          holds_or_none("masks", batch->masks, rows))
        return error;
    const long pages = batch->layer_stride / each / page;
    long tokens = 0;
    for (int b = 0; b < rows; b++) {
        const int start = batch->start[b], count = batch->count[b];
        const Span<const int32_t>& table = batch->tables[b];
        const long stored = (long)start + count, ends = stored + ahead_of(model, job, limit, b);
        if (const int error = within("start of a row", start, 0, MAX_COUNT) ?: within("count of a row", count, 1, MAX_COUNT) ?:
                              within("tokens that a row stores", ends, 1, MAX_COUNT) ?:
                              holds("the table of a row", table, (ends + page - 1) / page))
            return error;
        uint32_t last = 0;  // the largest number; one below 0 counts as larger than all
        for (const int32_t number : table) last = (uint32_t)number > last ? (uint32_t)number : last;
        if (const int error = within("a page of a row", last, 0, pages - 1)) return error;
        if (batch->masks.there() && batch->masks[b])
            if (const int error = holds("the mask of a row", batch->masks[b], count, stored)) return error;
        tokens += count;
    }
    if (const int error = within("tokens", batch->tokens, tokens, tokens)) return error;
    for (int t = 0; t < batch->tokens; t++)
        if (const int error = within("a token id", batch->token[t], 0, model->tokens - 1, OUTSIDE) ?:
                              within("a position", batch->position[t], 0, shape.positions - 1, OUTSIDE))
            return error;
    return OK;
}

// Prepares a call whose forwards have at most ``tokens`` tokens. ``deal`` takes the memory that only this job needs.
// ``limit`` is as in ``check``. Returns an error or OK.
template <class Deal>
int prepare(Call* call, Job job, Model* model, const Batch* batch, Arena* arena, int64_t tokens, int64_t last_rows,
            const int32_t* limit, Deal deal) {
    memset((void*)call, 0, sizeof(Call));
    if (const int error = check(model, job, batch, limit) ?: within("tokens of a forward", max_of(tokens, last_rows), 0, MAX_COUNT))
        return error;
    (Batch&)*call = *batch;
    call->job = job;
    call->model = model;
    if (const int error = lay_out(arena, "a call", false, [&](Dealer& from) {
            call->row = from.take<Row>(batch->rows), call->pieces = from.take<Piece>(batch->rows);
            deal(from);
        }))
        return error;
    int longest = 0;
    for (int b = 0; b < batch->rows; b++) {
        const uint8_t* mask = batch->masks.there() ? batch->masks[b].at : nullptr;
        call->row[b] = {batch->tables[b], mask, batch->start[b], batch->count[b]};
        longest = max_of(longest, batch->start[b] + batch->count[b] + ahead_of(model, job, limit, b));
    }
    if (const int error = make_room(model, (int)tokens, (int)last_rows, longest, threads_for(batch->threads))) return error;
    next_tile(call);
    return OK;
}

constexpr auto NOTHING = [](Dealer&) {};

// The same for a call without a batch, over so many ``rows`` of hidden states.
int prepare(Call* call, Job job, Model* model, const void* hidden, int rows, int threads) {
    memset((void*)call, 0, sizeof(Call));
    call->job = job;
    call->model = model;
    call->hidden = (void*)hidden;
    return make_room(model, rows, 0, 1, threads_for(threads));
}

// Runs a call of so many tokens in so many forwards. It waits for workers for an eighth of the call's estimated time
// (from a rough guess at the processor's speed), divided by ``share``, and at most a millisecond.
void start(Call* call, int threads, double tokens, double forwards, int share = 1) {
    const Shape& shape = call->model->shape;
    const double layer = (double)shape.width * (shape.heads + shape.kv_heads) * 2 * shape.head_dim +
                         3.0 * shape.width * shape.intermediate;
    const double weights = shape.layers * layer + (double)shape.width * shape.vocab;
    const double guess = weights * forwards / 32 + weights * tokens / 64;
    run(call, call->model->variant->work, threads, (2000 + (int64_t)(guess < 8e6 ? guess : 8e6) / 8) / share);
}

// Bytes of a value of the hidden states that go in and out.
int value_bytes(const Model* model) { return bytes_of_type(model->shape.hidden); }

// Writes a table [V, C], in the type of hidden states. Returns an error or OK.
int table(Model* model, Job job, Span<char> rows, int threads) {
    const Shape& shape = model->shape;
    if (const int error = holds("a table", rows, shape.vocab, shape.width, value_bytes(model))) return error;
    const Locked locked(model);
    Call call;
    if (const int error = prepare(&call, job, model, rows, threads_for(threads), threads)) return error;  // a row each
    start(&call, threads, shape.vocab, 1);
    return OK;
}

// Checks the hidden states that a draft head is fed. Returns an error or OK.
int check_head_states(const Model* model, const Batch* batch, Span<const char> head_states) {
    return holds("head_states", head_states, batch->tokens, model->shape.features, value_bytes(model));
}

// Checks that no row's block goes beyond the context. Returns an error or OK.
int check_blocks(const Model* model, const Batch* batch) {
    for (int b = 0; b < batch->rows; b++) {
        const int64_t end = (int64_t)batch->start[b] + batch->count[b] + model->shape.block;
        if (const int error = within("positions of a block", end, 1, model->shape.positions, OUTSIDE)) return error;
    }
    return OK;
}

}  // namespace

// Hidden states [T, C] of a batch.
EXPORT int fly_forward(Model* model, const Batch* batch, Span<char> hidden) {
    if (const int error = holds("hidden", hidden, batch->tokens, model->shape.width, value_bytes(model))) return error;
    Arena arena;
    const Locked locked(model);
    Call call;
    const int error = prepare(&call, FORWARD, model, batch, &arena, batch->tokens, 0, nullptr, NOTHING);
    if (error || !batch->tokens) return error;
    call.hidden = hidden;
    start(&call, batch->threads, batch->tokens, 1);
    return OK;
}

// Logits [T, V], float32, of hidden states [T, C].
EXPORT int fly_logits(Model* model, Span<const char> hidden, int tokens, Span<float> logits, int threads) {
    if (const int error = within("tokens", tokens, 0, MAX_COUNT) ?: holds("logits", logits, tokens, model->shape.vocab) ?:
                          holds("hidden", hidden, tokens, model->shape.width, value_bytes(model)))
        return error;
    if (!tokens) return OK;
    const Locked locked(model);
    Call call;
    if (const int error = prepare(&call, LOGITS, model, hidden, tokens, threads)) return error;
    call.kept_count = tokens;
    call.logits = logits;
    start(&call, threads, tokens, 1, 8);
    return OK;
}

// The embedding of each token [V, C], in the type of hidden states.
EXPORT int fly_embedding(Model* model, Span<char> embedding, int threads) { return table(model, EMBED, embedding, threads); }

// The same of the rows of the head.
EXPORT int fly_head_rows(Model* model, Span<char> rows, int threads) { return table(model, ROWS, rows, threads); }

// Runs a forward and computes ``logits`` [N, V], float32, after the tokens with the numbers ``kept`` [N] (none: all).
// ``choice`` gets the most likely token of each, and the lowest id among equals. ``read`` [T, states · C] gets the
// residual stream of all tokens after each number of layers in ``state``, in the type of hidden states.
EXPORT int fly_score(Model* model, const Batch* batch, Span<const int32_t> kept, Span<float> logits, Span<int32_t> choice,
                     Span<const int32_t> state, Span<char> read) {
    const Shape& shape = model->shape;
    const int64_t count = kept.there() ? kept.count() : batch->tokens, states = state.count();
    if (const int error = within("tokens", batch->tokens, 0, MAX_COUNT) ?: holds("logits", logits, count, shape.vocab) ?:
                          holds_or_none("choice", choice, count) ?:
                          (states ? holds("read", read, batch->tokens, states, shape.width, value_bytes(model)) : OK))
        return error;
    for (const int32_t number : kept)
        if (const int error = within("a token to score", number, 0, batch->tokens - 1)) return error;
    for (const int32_t passed : state)
        if (const int error = within("layers passed", passed, 0, shape.layers)) return error;
    Arena arena;
    const Locked locked(model);
    Call call;  // a token may be kept more than once
    const int64_t most = max_of<int64_t>(count, batch->tokens);
    const int error = prepare(&call, SCORE, model, batch, &arena, most, 0, nullptr, [&](Dealer& from) {
        call.hidden = from.take<char>(batch->tokens, shape.width, value_bytes(model));
    });
    if (error || !batch->tokens) return error;
    call.kept = kept.there() ? kept.at : nullptr, call.kept_count = (int)count;
    call.logits = logits, call.choice = choice.there() ? choice.at : nullptr;
    call.state = state, call.states = (int)states, call.read = read;
    start(&call, batch->threads, batch->tokens, 1);
    return OK;
}

// A step of a draft head. It reads ``head_states`` [T, F], the target's hidden states before each token of the batch, in the
// type of the head's own. If there are none, it reads ``x`` [T, C] in float32, a feature for each token. It writes
// ``logits`` [N, U] after the tokens numbered ``kept`` [N], and ``features`` [T, C] in float32 after all tokens.
// ``fly_draft`` carries the same features from step to step, so it drafts the same.
EXPORT int fly_step(Model* model, const Batch* batch, Span<const char> head_states, Span<const float> x,
                    Span<const int32_t> kept, Span<float> logits, Span<float> features) {
    const Shape& shape = model->shape;
    const int tokens = batch->tokens, width = shape.width;
    if (const int error = within("features of a head", shape.features, 1, MAX_COUNT) ?: within("block", shape.block, 0, 0) ?:
                          (head_states.there() ? holds("head_states", head_states, tokens, shape.features, value_bytes(model)) :
                                                 holds("x", x, tokens, width)) ?:
                          holds("logits", logits, kept.count(), shape.vocab) ?:
                          holds("features", features, tokens, width))
        return error;
    for (const int32_t number : kept)
        if (const int error = within("a token to score", number, 0, tokens - 1)) return error;
    Arena arena;
    const Locked locked(model);
    Call call;
    const int64_t most = max_of<int64_t>(kept.count(), tokens);
    const int error = prepare(&call, SCORE, model, batch, &arena, most, tokens, nullptr, [&](Dealer& from) {
        call.hidden = from.take<char>(tokens, width, value_bytes(model));
        call.carried_at = from.take<int32_t>(tokens);
    });
    if (error || !tokens) return error;
    for (int t = 0; t < tokens; t++) call.carried_at[t] = t;
    call.head_states = head_states.there() ? head_states.at : nullptr;
    if (!call.head_states) copy(model->work.carried, x.at, (long)tokens * width);
    call.kept = kept, call.kept_count = (int)kept.count();
    call.logits = logits;
    call.features = features.at;
    start(&call, batch->threads, tokens, 1);
    return OK;
}

// Reads the context of a block drafter: stores keys and values for the target's hidden states [T, F] before each
// token of the batch, in the type of the drafter's hidden states.
EXPORT int fly_read(Model* model, const Batch* batch, Span<const char> head_states) {
    if (const int error = within("block", model->shape.block, 1, MAX_TILE) ?: check_head_states(model, batch, head_states))
        return error;
    Arena arena;
    const Locked locked(model);
    Call call;
    const int error = prepare(&call, READ, model, batch, &arena, batch->tokens, 0, nullptr, NOTHING);
    if (error || !batch->tokens) return error;
    call.head_states = head_states;
    start(&call, batch->threads, batch->tokens, 1);
    return OK;
}

// Reads the context as fly_read does, and then runs a forward over a block of each row. A block begins at its anchor, the
// row's last token in the batch. Writes the ``hidden`` states of all places [B, block, C], and the uncorrected ``logits``
// [B, most, U] of the first ``most`` drafts, float32.
EXPORT int fly_block(Model* model, const Batch* batch, int most, Span<const char> head_states, Span<char> hidden,
                     Span<float> logits) {
    const Shape& shape = model->shape;
    const int rows = batch->rows, block = shape.block;
    if (const int error = within("block", block, 1, MAX_TILE) ?: check_head_states(model, batch, head_states) ?:
                          within("most", most, 0, block - shape.first) ?: holds("start", batch->start, rows) ?:
                          holds("count", batch->count, rows) ?: check_blocks(model, batch) ?:
                          holds("hidden", hidden, rows, block, shape.width, value_bytes(model)) ?:
                          holds("logits", logits, rows, most, shape.vocab))
        return error;
    Arena arena;
    const Locked locked(model);
    Call call;
    Span<int32_t> kept;
    const int64_t tokens = max_of<int64_t>(batch->tokens, (int64_t)rows * block);
    const int error = prepare(&call, PLACES, model, batch, &arena, tokens, 0, nullptr, [&](Dealer& from) {
        call.live_token = from.take<int64_t>(rows, block), call.live_position = from.take<int64_t>(rows, block);
        call.anchor = from.take<int64_t>(rows), kept = from.take<int32_t>(rows, most);
    });
    if (error || !rows) return error;
    for (int i = 0; i < rows * most; i++) kept[i] = i / most * block + shape.first + i % most;
    call.head_states = head_states, call.hidden = hidden, call.logits = logits;
    call.kept = kept, call.kept_count = rows * most;
    start(&call, batch->threads, batch->tokens + (double)rows * block, 1);
    return OK;
}

// Drafts chains (drafting.h). Row b drafts at most ``limit[b]`` tokens (1 to ``most``). It ends earlier after one of
// its ``stop`` ids, or where ``stops[b]`` says. All drafted tokens but the last are stored, so its pages must have room
// for count[b] + limit[b] - 1 tokens. A block drafter stores its block in place of them (blockdraft.h).
//
// Without ``sampling``, tokens are the most likely ones. Otherwise they are drawn by ``uniform`` [B, most] from the
// processed distributions, which are written to ``distributions`` [B, most, V], with zeros after a row's last token.
// ``raw`` has a span [most, V] or none for each row. A span gets the logits at each token, and zeros after the row's last.
// A ``lookup`` (or null) changes no token; it copies from ``texts``, which hold the start[b] stored tokens of each row.
//
// A draft head is fed the target's hidden states [T, F] before each token of the batch, in the type of the head's
// hidden states. It has no lookup. A parallel head drafts all tokens of a row in one forward, and stores a mask token in place
// of each but the last. Its distributions and logits are over the target's vocabulary.
EXPORT int fly_draft(Model* model, const Batch* batch, int most, Span<const int32_t> limit,
                     Span<const Span<const int64_t>> stop, Span<int64_t> drafted, Span<int32_t> drafted_count,
                     Span<const Sampling> sampling, Span<const float> uniform, Span<float> distributions,
                     Span<const Span<float>> raw, Lookup* lookup, Span<const Span<const int32_t>> texts,
                     Span<const Stops> stops, Span<const char> head_states) {
    const Shape& shape = model->shape;
    const int rows = batch->rows;
    if (const int error = within("most", most, 0, MAX_COUNT) ?: holds("limit", limit, rows) ?: holds("stop", stop, rows) ?:
                          holds("drafted", drafted, rows, most) ?: holds("drafted_count", drafted_count, rows) ?:
                          holds("stops", stops, rows) ?: within("masks of a draft", batch->masks.there(), 0, 0) ?:
                          holds("start", batch->start, rows) ?: holds("count", batch->count, rows) ?:
                          (shape.features ? check_head_states(model, batch, head_states) : OK) ?:
                          within("masks that are set", model->masked.at != nullptr, shape.parallel, 1) ?:
                          (shape.block ? check_blocks(model, batch) : OK))
        return error;
    if (lookup)
        if (const int error = holds("texts", texts, rows) ?: within("lookup.most", lookup->most, 0, INT32_MAX) ?:
                              within("features of who looks up", shape.features, 0, 0))
            return error;
    if (sampling.there())
        if (const int error = holds("sampling", sampling, rows) ?:
                              holds("distributions", distributions, rows, most, model->tokens))
            return error;
    if (raw.there()) {
        if (const int error = holds("raw", raw, rows)) return error;
        for (int b = 0; b < rows; b++)
            if (const int error = holds_or_none("raw of a row", raw[b], most, model->tokens)) return error;
    }
    int64_t text = 0, places = 0;  // of all rows: tokens, and tokens to draft
    for (int b = 0; b < rows; b++) {
        const int64_t known = (int64_t)batch->start[b] + batch->count[b];
        const int64_t longest = shape.block ? shape.block - shape.first : shape.positions + 1 - known;
        if (const int error = within("limit of a row", limit[b], 1, most) ?:
                              within("tokens to draft within the context", limit[b], 1, longest, OUTSIDE) ?:
                              (sampling.there() && sampling[b].temperature > 0 ? holds("uniform", uniform, rows, most) : OK) ?:
                              (lookup ? holds("the text of a row", texts[b], batch->start[b]) : OK))
            return error;
        text += known + limit[b], places += limit[b];
    }
    const int64_t copies = lookup ? min_of<int64_t>((int64_t)rows * min_of(lookup->most, most), MAX_COPIES) : 0;
    const int64_t laid = shape.parallel ? batch->tokens + places - rows : (int64_t)rows * shape.block;
    const int64_t tokens = max_of(batch->tokens + copies, laid), last_rows = rows + (at_once(shape) ? places : copies);
    int32_t* end;
    Span<float> state;
    Arena arena;
    const Locked locked(model);
    Call call;
    if (const int error = prepare(&call, DRAFT, model, batch, &arena, tokens, last_rows, limit, [&](Dealer& from) {
            call.carried_at = from.take<int32_t>(rows), call.reached = from.take<float>(rows);
            call.live_row = from.take<int32_t>(rows), call.matched = from.take<int32_t>(rows);
            call.kept_at = from.take<int32_t>(rows + 1L), call.text = from.take<int32_t*>(rows);
            call.live_token = from.take<int64_t>(tokens), call.live_position = from.take<int64_t>(tokens);
            end = from.take<int32_t>(at_once(shape) ? 0 : text);
            if (shape.parallel) call.head_state_at = from.take<int32_t>(tokens);
            if (!at_once(shape)) return;
            const int rank = padded(shape.rank), act = model->variant->activation_bytes(shape.weights);
            call.anchor = from.take<int64_t>(rows), call.chance = from.take<float>(rows, most);
            call.before = from.take<float>(rows, rank), call.correct_in = from.take<char>(rows, rank, act);
            call.memory = state = from.take<float>(rows, rank), call.joined = from.take<float>(rows, model->joint.panels, PANEL);
            call.joint_in = from.take<char>(rows, padded(model->joint.k), act);
        }))
        return error;
    if (!rows) return OK;
    call.most = most, call.limit = limit, call.stop = stop;
    call.drafted = drafted, call.drafted_count = drafted_count;
    call.sampling = sampling.there() ? sampling.at : nullptr, call.uniform = uniform, call.distributions = distributions;
    call.raw = raw.there() ? raw.at : nullptr;
    call.lookup = lookup, call.stops = stops;
    call.head_states = head_states.there() ? head_states.at : nullptr;
    const int64_t* token = batch->token;
    call.kept_at[0] = 0;
    if (state.bytes > 0) memset(state.at, 0, state.bytes);
    for (int b = 0; b < rows; b++) {
        call.live_row[b] = b;
        drafted_count[b] = 0;
        call.reached[b] = 1;
        if (at_once(shape)) {
            call.kept_at[b + 1] = call.kept_at[b] + limit[b];
            continue;
        }
        call.text[b] = end;
        if (lookup) copy(end, texts[b].at, batch->start[b]);
        end += batch->start[b];
        for (int n = 0; n < batch->count[b]; n++) *end++ = (int32_t)*token++;
        end += limit[b];
    }
    call.live_rows = rows;
    start(&call, batch->threads, batch->tokens + (double)rows * most, at_once(shape) ? 1 : most);
    const long vocab = model->tokens;
    for (int b = 0; b < rows; b++) {
        const long drafted_values = drafted_count[b] * vocab, after = (most - drafted_count[b]) * vocab * 4;
        if (call.sampling) memset(distributions + (long)b * most * vocab + drafted_values, 0, after);
        if (call.raw && call.raw[b].there()) memset(call.raw[b] + drafted_values, 0, after);
    }
    return OK;
}
