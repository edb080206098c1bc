// Calls of a packed model: what the Python side hands over is checked, laid out for the threads, and run. Knows nothing of
// the arithmetic, nor of rounds.
#include "library.h"

using namespace fly;

namespace {

long bytes_of_rows(const Batch* batch) { return batch->rows * (long)(sizeof(Row) + sizeof(Piece)) + 2 * 64; }

int check(const Model* model, const Batch* batch) {
    for (int t = 0; t < batch->tokens; t++) {
        if (batch->token[t] < 0 || batch->token[t] >= model->tokens) return BAD_TOKEN;
        if (batch->position[t] < 0 || batch->position[t] >= model->shape.positions) return BAD_POSITION;
    }
    return OK;
}

// Everything of a call but its work, for forwards of at most ``tokens`` that store up to ``extra`` tokens of a row after
// those of the batch. Returns an error or OK.
int prepare(Call* call, Job job, Model* model, const Batch* batch, Arena* arena, int tokens, int last_rows, int extra) {
    memset((void*)call, 0, sizeof(Call));
    if (!arena->base) return NO_MEMORY;
    if (const int error = check(model, batch)) return error;
    (Batch&)*call = *batch;
    call->job = job;
    call->model = model;
    Row* rows = arena->take<Row>(batch->rows);
    int longest = 0;
    for (int b = 0; b < batch->rows; b++) {
        rows[b] = {batch->tables + batch->table_at[b], batch->masks ? batch->masks[b] : nullptr, batch->start[b],
                   batch->count[b]};
        longest = most_of(longest, batch->start[b] + batch->count[b]);
    }
    call->row = rows;
    call->pieces = arena->take<Piece>(batch->rows);
    if (!make_room(model, tokens, last_rows, longest + extra, threads_for(batch->threads))) return NO_MEMORY;
    next_tile(call);
    return OK;
}

// Runs a call of so many tokens in so many forwards. It waits for workers an eighth (of that, ``share``) of what it will
// take, by a rough guess at the processor, and at most a millisecond.
void start(Call* call, int threads, long tokens, long forwards, int share = 1) {
    const Shape& shape = call->model->shape;
    const long layer = (long)shape.width * (shape.heads + shape.kv_heads) * 2 * shape.head_dim +
                       3L * shape.width * shape.intermediate;
    const long weights = shape.layers * layer + (long)shape.width * shape.vocab;
    const int64_t guess = weights * forwards / 32 + weights * tokens / 64;
    run(call, call->model->variant->work, threads, (2000 + (guess < 8000000 ? guess : 8000000) / 8) / share);
}

}  // namespace

// Hidden states [T, C] of a batch. Positions and tokens are checked before anything is written.
EXPORT int fly_forward(Model* model, const Batch* batch, void* hidden) {
    Arena arena(bytes_of_rows(batch));
    const Locked locked(model);
    Call call;
    const int error = prepare(&call, FORWARD, model, batch, &arena, batch->tokens, 0, 0);
    if (error || !batch->tokens) return error;
    call.hidden = hidden;
    start(&call, batch->threads, batch->tokens, 1);
    return OK;
}

// Logits [T, V], float32, of hidden states [T, C].
EXPORT int fly_logits(Model* model, const void* hidden, int tokens, float* logits, int threads) {
    if (!tokens) return OK;
    const Locked locked(model);
    Call call;
    memset((void*)&call, 0, sizeof(Call));
    call.job = LOGITS;
    call.model = model;
    call.kept_count = tokens;
    call.hidden = (void*)hidden;
    call.logits = logits;
    if (!make_room(model, tokens, 0, 1, threads_for(threads))) return NO_MEMORY;
    start(&call, threads, tokens, 1, 8);
    return OK;
}

// What each token is fed as [V, C], in the type of hidden states.
EXPORT int fly_embedding(Model* model, void* embedding, int threads) {
    const Locked locked(model);
    Call call;
    memset((void*)&call, 0, sizeof(Call));
    call.job = EMBED;
    call.model = model;
    call.hidden = embedding;
    if (!make_room(model, threads_for(threads), 0, 1, threads_for(threads))) return NO_MEMORY;  // a row each
    start(&call, threads, model->shape.vocab, 1);
    return OK;
}

// Logits [N, V], float32, after the tokens of a batch numbered in ``kept`` [N] (null: all), and the most likely token of
// each, the lowest id among equals: a forward and its logits in one call. ``read`` [T, states · C] gets the residual stream
// of all tokens after ``state`` layers each, in the type of hidden states.
EXPORT int fly_score(Model* model, const Batch* batch, const int32_t* kept, int count, float* logits, int32_t* choice,
                     const int32_t* state, int states, void* read) {
    const long bytes = (long)batch->tokens * model->shape.width * (model->shape.hidden == FLOAT32 ? 4 : 2);
    Arena arena(bytes_of_rows(batch) + bytes + 64);
    const Locked locked(model);
    Call call;  // a token may be kept more than once
    const int error = prepare(&call, SCORE, model, batch, &arena, most_of(count, batch->tokens), 0, 0);
    if (error || !batch->tokens) return error;
    call.hidden = arena.take<char>(bytes);
    call.kept = kept, call.kept_count = count;
    call.logits = logits, call.choice = choice;
    call.state = state, call.states = states, call.read = read;
    start(&call, batch->threads, batch->tokens, 1);
    return OK;
}

// A step of a draft head: each token of a batch is fed with what it is ``given`` of the target's hidden states [T, F], in
// the type of its own, or (null) with a feature ``x`` [T, C], float32. Logits [N, U] after the tokens numbered in ``kept``
// [N], and the features after all of them, ``features`` [T, C], in the type of hidden states.
EXPORT int fly_step(Model* model, const Batch* batch, const void* given, const float* x, const int32_t* kept, int count,
                    float* logits, void* features) {
    const int32_t after[] = {1};
    const long width = model->shape.width, bytes = batch->tokens * width * (model->shape.hidden == FLOAT32 ? 4 : 2);
    Arena arena(bytes_of_rows(batch) + bytes + batch->tokens * 4L + 2 * 64);
    const Locked locked(model);
    Call call;
    if (const int error = prepare(&call, SCORE, model, batch, &arena, batch->tokens, batch->tokens, 0)) return error;
    if (!batch->tokens) return OK;
    call.hidden = arena.take<char>(bytes);
    call.carried_at = arena.take<int32_t>(batch->tokens);
    for (int t = 0; t < batch->tokens; t++) call.carried_at[t] = t;
    call.given = given;
    if (!given) memcpy(model->work.carried, x, batch->tokens * width * sizeof(float));
    call.kept = kept, call.kept_count = count;
    call.logits = logits;
    call.state = after, call.states = 1, call.read = features;
    start(&call, batch->threads, batch->tokens, 1);
    return OK;
}

// Continuations: row b drafts until limit[b] tokens stand, at least 1 and at most ``most``, or one of its stop ids, or
// the first it is not ``sure[b]`` of. All but the last are then stored, so the rows' pages must have room for count[b] +
// limit[b] - 1 new tokens. Tokens are the most likely ones where ``sampling`` is null; else drawn by ``uniform`` from what
// ``distributions`` [B, most, V] shows then, with zeros after the last; at a temperature below 0 they are the most likely
// ones, and it shows the logits. They are the same with a
// ``lookup`` (or null), which copies from ``texts``: of each row the start[b] tokens that are stored. New tokens are
// causal, at the positions after those. A draft head takes what it is ``given`` of the target's hidden states [T, F] before
// each token of the batch, in the type of its own, and has no lookup; its distributions are over the target's vocabulary.
EXPORT int fly_draft(Model* model, const Batch* batch, int most, const int32_t* limit, const int64_t* stop,
                     const int32_t* stop_at, int64_t* drafted, int32_t* drafted_count, const Sampling* sampling,
                     const float* uniform, float* distributions, Lookup* lookup, const int32_t* const* texts, const Sure* sure,
                     const void* given) {
    const int rows = batch->rows, copies = lookup ? least_of(rows * least_of(lookup->most, most), MAX_COPIES) : 0;
    const int tokens = batch->tokens + copies;
    long text = 0;
    for (int b = 0; b < rows; b++) text += batch->start[b] + batch->count[b] + limit[b];
    Arena arena(bytes_of_rows(batch) + rows * (long)(sizeof(Row) + 5 * 4 + 8) + 4 + tokens * 16L + text * 4 + 10 * 64);
    const Locked locked(model);
    Call call;
    if (const int error = prepare(&call, DRAFT, model, batch, &arena, tokens, rows + copies, most)) return error;
    for (int b = 0; b < rows; b++)
        if (batch->start[b] + batch->count[b] + limit[b] - 1 > model->shape.positions) return BAD_POSITION;
    if (!rows) return OK;
    call.most = most, call.limit = limit, call.stop = stop, call.stop_at = stop_at;
    call.drafted = drafted, call.drafted_count = drafted_count;
    call.sampling = sampling, call.uniform = uniform, call.distributions = distributions;
    call.lookup = lookup, call.sure = sure;
    call.given = given;
    call.carried_at = arena.take<int32_t>(rows);
    call.live = arena.take<Row>(rows);
    call.reached = arena.take<float>(rows);
    call.live_row = arena.take<int32_t>(rows);
    call.matched = arena.take<int32_t>(rows);
    call.kept_at = arena.take<int32_t>(rows + 1);
    call.text = arena.take<int32_t*>(rows);
    call.live_token = arena.take<int64_t>(tokens);
    call.live_position = arena.take<int64_t>(tokens);
    int32_t* end = arena.take<int32_t>(text);
    const int64_t* token = batch->token;
    for (int b = 0; b < rows; b++) {
        call.live[b] = call.row[b];
        call.live_row[b] = b;
        drafted_count[b] = 0;
        call.reached[b] = 1;
        call.text[b] = end;
        if (lookup) memcpy(end, texts[b], batch->start[b] * sizeof(int32_t));
        end += batch->start[b];
        for (int n = 0; n < batch->count[b]; n++) *end++ = (int32_t)*token++;
        end += limit[b];
    }
    call.row = call.live;
    call.live_rows = rows;
    start(&call, batch->threads, batch->tokens + (long)rows * most, most);
    const long vocab = model->tokens;
    for (int b = 0; sampling && b < rows; b++)
        memset(distributions + ((long)b * most + drafted_count[b]) * vocab, 0, (most - drafted_count[b]) * vocab * 4);
    return OK;
}
