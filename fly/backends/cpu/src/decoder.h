// The decoder, written once for all variants. Each variant includes this file in a namespace of its own, after its vector type
// ``Vec`` of ``W`` floats and its types of weights with their products ``multiply``. All threads of a call run ``work`` (at the
// end of this file) side by side, each on its part, and meet at barriers. Knows nothing of instructions.
//
// One rule holds for everything included here: a value is computed by the same operations in the same order, however many
// tokens, rows and threads there are, and wherever a row's pages are. A product is summed over its inputs in ascending order,
// and so is attention over stored tokens.

#include "products.h"
#include "attention.h"
#include "layers.h"
#include "sampling.h"
#include "logits.h"
#include "lookup.h"
#include "drafting.h"

// Logits of all tokens or of the kept ones, whose hidden states lie in order, and the most likely token of each.
template <class Wt, class H>
void project_all(Call* call, int thread) {
    typedef typename Wt::Act Act;
    const int width = call->model->shape.width, vocab = call->model->shape.vocab;
    const long ldx = padded(width);
    Act* normed = (Act*)call->model->work.normed;
    for (int at = 0; at < call->kept_count; at += MAX_TILE) {
        const int rows = min_of(call->kept_count - at, MAX_TILE);
        const Range mine = part(rows, thread, call->threads);
        for (int t = mine.from; t < mine.to; t++) {
            const long from = call->kept ? call->kept[at + t] : at + t;
            convert((const H*)call->hidden + from * width, width, normed + t * ldx, (int)ldx);
        }
        wait(call);
        project<Wt>(call, normed, rows, call->logits + (long)at * vocab, thread);
        wait(call);
        for (int t = mine.from; call->choice && t < mine.to; t++) {
            const float* logits = call->logits + (long)(at + t) * vocab;
            // With a sketch, a row of NaN has -inf beside its NaN, and ``best`` may return such a place.
            bool numbers;
            const int64_t likeliest = best(logits, vocab, &numbers);
            call->choice[at + t] = numbers && logits[likeliest] > -__builtin_inff() ? (int32_t)likeliest : NO_NUMBER;
        }
    }
}

#include "blockdraft.h"

// The embeddings of all tokens of the vocabulary, or the rows of the head, in the type of hidden states.
template <class Wt, class H>
void embed_all(Call* call, int thread) {
    const Model* model = call->model;
    const int width = model->shape.width;
    float* x = model->work.x + thread * padded(width);
    const Range mine = part(model->shape.vocab, thread, call->threads);
    for (int token = mine.from; token < mine.to; token++) {
        if (call->job == EMBED)
            embed<Wt>(model, token, x);
        else
            head_row<Wt>(model, token, x);
        convert(x, width, (H*)call->hidden + (long)token * width);
    }
}

// Chooses the code for the job of a call and for its types: weights, hidden states, cache.
template <class Wt, class H, class K>
void work(Call* call, int thread) {
    if (call->job == READ) return read_context<Wt, K, H>(call, thread);
    if (call->job == PLACES || (call->job == DRAFT && at_once(call->model->shape))) return draft_at_once<Wt, K, H>(call, thread);
    if (call->job == DRAFT) return draft<Wt, K, H>(call, thread);
    if (call->job == EMBED || call->job == ROWS) return embed_all<Wt, H>(call, thread);
    if (call->job != LOGITS) tiles<Wt, K, H>(call, thread, nullptr);
    if (call->job == SCORE) wait(call);
    if (call->job != FORWARD) project_all<Wt, H>(call, thread);
}

template <class Wt, class H>
void work(Call* call, int thread) {
    return call->cache_type == BFLOAT16 ? work<Wt, H, uint16_t>(call, thread) : work<Wt, H, float>(call, thread);
}

template <class Wt>
void work(Call* call, int thread) {
    return call->model->shape.hidden == BFLOAT16 ? work<Wt, uint16_t>(call, thread) : work<Wt, float>(call, thread);
}

void work(Call* call, int thread) {
    const int type = call->model->shape.weights;
    if (type == BFLOAT16) return work<BFloat16, uint16_t>(call, thread);
    if (type == FLOAT32) return work<Float32, float>(call, thread);
    return type == W8A8 ? work<Whole8>(call, thread) : work<Grouped>(call, thread);
}

int activation_bytes(int weights) {
    const size_t bytes[] = {sizeof(Float32::Act), sizeof(BFloat16::Act), sizeof(Whole8::Act), sizeof(Grouped::Act)};  // Type
    return (int)bytes[weights];
}

// The entry of this variant in the library's table (fly.h: Variant).
#define CODE(NAME, TILES) {NAME, TILES, activation_bytes, lay_scratch, work, top, entropy, kept, accepts, follow, look_up}
