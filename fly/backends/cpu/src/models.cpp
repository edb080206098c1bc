// Models: their matrices, packed into panels, and the workspace that the calls of a model share. Knows nothing of the arithmetic.
#include <initializer_list>

#include "library.h"

using namespace fly;

namespace {

float* vector_of(const float* from, int64_t n, int64_t room) {
    float* to = (float*)allocate(room * 4);
    if (to) copy(to, from, n);
    return to;
}

template <class T>
void pack(Matrix* matrix, const T* from, Layout layout, bool pairs) {
    const int k = matrix->k, step = layout.step, steps = padded(k, layout.whole) / step;
    for (int panel = 0; panel < matrix->panels; panel++) {
        const T* rows[PANEL];
        bool full = true;
        for (int lane = 0; lane < PANEL; lane++) {
            const int row = source_row(panel, lane, matrix->n, pairs);
            rows[lane] = row < 0 ? nullptr : from + (long)row * k;
            full &= row >= 0;
        }
        T* to = (T*)(matrix->data + panel * matrix->panel_bytes);
        int s = 0;
        for (; full && s < k / step; s++)
            for (int lane = 0; lane < PANEL; lane++, to += step) memcpy(to, rows[lane] + s * step, 4);
        for (; s < steps; s++)
            for (int lane = 0; lane < PANEL; lane++)
                for (int j = 0; j < step; j++, to++) *to = rows[lane] && s * step + j < k ? rows[lane][s * step + j] : (T)0;
    }
}

// Makes an array with one value for each output of a matrix: ``of`` its row, or 0 for padding. False if memory runs
// out.
template <class T, class Of>
bool by_output(const Matrix& matrix, bool pairs, T** to, Of of) {
    if (!(*to = (T*)allocate(matrix.panels * PANEL * (long)sizeof(T)))) return false;
    for (int j = 0; j < matrix.panels * PANEL; j++) {
        const int row = source_row(j / PANEL, j % PANEL, matrix.n, pairs);
        if (row >= 0) (*to)[j] = of(row);
    }
    return true;
}

// ``bias`` and ``scale`` [N] float32; no bias is null, and so is the scale of all types but W8A8.
bool make(Matrix* matrix, int n, int k, const void* data, const float* bias, const float* scale, int type, bool pairs) {
    const Layout layout = layout_of(type);
    const int bytes = bytes_of_type(type);
    matrix->n = n, matrix->k = k;
    matrix->panels = panels_of(n, pairs);
    matrix->panel_bytes = (long)padded(k, layout.whole) * PANEL * bytes;
    if (!(matrix->data = (char*)allocate(matrix->panel_bytes * matrix->panels, false))) return false;
    if (bytes == 4)
        pack(matrix, (const uint32_t*)data, layout, pairs);
    else if (bytes == 2)
        pack(matrix, (const uint16_t*)data, layout, pairs);
    else
        pack(matrix, (const uint8_t*)data, layout, pairs);
    const auto offset = [&](int row) {
        int32_t sum = 0;
        for (long i = 0; i < k; i++) sum += ((const int8_t*)data)[row * (long)k + i];
        return 128 * sum;
    };
    return (!scale || (by_output(*matrix, pairs, &matrix->offset, offset) &&
                       by_output(*matrix, pairs, &matrix->scale, [=](int row) { return scale[row]; }))) &&
           (!bias || bias_of(matrix, bias, pairs));
}

}  // namespace

void fly::drop(const Matrix& matrix) {
    for (void* memory : {(void*)matrix.data, (void*)matrix.bias, (void*)matrix.scale, (void*)matrix.offset, (void*)matrix.strips})
        free(memory);
}

int fly::place_of(Model* model, int number, int which, MatrixPlace* place) {
    const Shape& s = model->shape;
    const int last = s.markov > VANILLA ? 7 : s.markov ? 6 : s.features ? 5 : 4;
    if (const int error = within("layer", number, 0, s.layers - 1) ?: within("matrix", which, 0, last)) return error;
    Layer& layer = model->layers[number];
    const int attended = s.heads * s.head_dim, qkv = attended + 2 * s.kv_heads * s.head_dim;
    const bool gated = s.markov == GATED;
    const MatrixPlace all[] = {{&layer.qkv, qkv, combines(s) && !number ? 2 * s.width : s.width}, {&layer.o, s.width, attended},
                            {&layer.gate_up, 2 * s.intermediate, s.width}, {&layer.down, s.width, s.intermediate},
                            {&model->head, s.vocab, s.width}, {&model->fuse, s.width, s.features},
                            {&model->correct, s.vocab, s.rank},
                            {&model->joint, gated ? s.rank : 3 * s.rank, s.width + (gated ? s.rank : 2 * s.rank)}};
    *place = all[which];
    return OK;
}

bool fly::bias_of(Matrix* matrix, const float* bias, bool pairs) {
    return by_output(*matrix, pairs, &matrix->bias, [=](int row) { return bias[row]; });
}

namespace {

// Whether there is code for a model of these sizes, and no product of sizes overflows the type that it is counted in.
int check(const Shape& s) {
    constexpr int WIDE = 1 << 24, HEADS = 1 << 16, WIDEST_HEAD = 1024, EXACT = 1 << 16;
    return within("width", s.width, 1, WIDE) ?: within("intermediate", s.intermediate, 1, WIDE) ?:
           within("layers", s.layers, 1, HEADS) ?: within("kv_heads", s.kv_heads, 1, HEADS) ?:
           within("heads", s.heads, s.kv_heads, HEADS) ?: within("heads, of kv_heads,", s.heads % s.kv_heads, 0, 0) ?:
           within("head_dim", s.head_dim, 2, WIDEST_HEAD) ?: within("head_dim, by 2,", s.head_dim % 2, 0, 0) ?:
           within("vocab", s.vocab, 1, MAX_COUNT) ?: within("positions", s.positions, 1, MAX_COUNT) ?:
           within("weights", s.weights, FLOAT32, GROUPED) ?: within("hidden", s.hidden, FLOAT32, BFLOAT16) ?:
           within("ropes", s.ropes, 1, HEADS) ?: within("features", s.features, 0, WIDE) ?:
           within("width of a head, by 32,", s.features ? s.width % PANEL : 0, 0, 0) ?:
           within("parallel", s.parallel, 0, combines(s)) ?:
           within("block", s.block, 0, s.features ? MAX_TILE : 0) ?: within("first", s.first, 0, max_of(s.block - 1, 0)) ?:
           within("mask", s.mask, 0, MAX_COUNT) ?: within("markov", s.markov, UNCORRECTED, s.block ? RECURRENT : UNCORRECTED) ?:
           within("rank", s.rank, s.markov ? 1 : 0, s.markov ? WIDE : 0) ?:
           within("confidence", s.confidence, 0, s.block ? s.width + s.rank : 0) ?:
           within("confidence beside rank", s.confidence == s.width + s.rank ? 0 : s.confidence % s.width, 0, 0) ?:
           within("inputs of 8 bits", s.weights == W8A8 ? most_inputs(s) : 0, 0, EXACT);  // whose sums are exact
}

}  // namespace

int fly::make_room(Model* model, int tokens, int last_rows, int longest, int threads) {
    const Shape& shape = model->shape;
    Workspace& work = model->work;
    const int act = model->variant->activation_bytes(shape.weights), width = padded(shape.width);
    if (min_of(tokens, MAX_TILE) > work.tile) {
        const int tile = tokens <= 32 ? 32 : MAX_TILE;
        work.tile = 0;
        const Layer& layer = model->layers[0];
        if (const int error = lay_out(&work.tile_memory, "the workspace of a tile", true, [&](Dealer& from) {
                const bool drafts = combines(shape);
                work.x = from.take<float>(tile, width);
                work.embedded = from.take<float>(drafts ? tile : 0, width);
                work.head_states = from.take<char>(tile, padded(shape.features), act);
                work.part = from.take<float>(adds_apart(model) ? tile : 0, width);
                work.qkv = from.take<float>(tile, layer.qkv.panels, PANEL);
                work.normed = from.take<char>(drafts ? 2 : 1, tile, width, act);
                work.attended = from.take<char>(tile, padded(shape.heads * shape.head_dim), act);
                work.gated = from.take<char>(tile, padded(shape.intermediate), act);
                work.narrow = from.take<uint8_t>(narrows(shape) ? tile : 0, padded(most_inputs(shape), 64));
                work.steps = from.take<float>(tile, steps_of(shape));
                const Sketch& sketch = model->sketch;
                work.tables = from.take<uint8_t>(LIKELY_ROWS, sketch.eighths, 2, 16);
                work.peaks = from.take<float>(LIKELY_ROWS, strips_of(sketch));
                work.likely = from.take<int32_t>(LIKELY_ROWS, strips_of(sketch));
                work.likely_count = from.take<int32_t>(LIKELY_ROWS);
            }))
            return error;
        work.tile = tile;
    }
    const int spreads = at_once(shape) ? threads : 1;
    if (last_rows > work.last_rows || (last_rows && spreads > work.spreads)) {
        last_rows = max_of(last_rows, work.last_rows);
        work.last_rows = 0;
        if (const int error = lay_out(&work.last_memory, "the workspace of a draft", true, [&](Dealer& from) {
                work.last = from.take<char>(last_rows, width, act);
                work.logits = from.take<float>(last_rows, shape.vocab);
                work.spread = from.take<float>(spreads, 2, padded(shape.vocab));
                work.carried = from.take<float>(combines(shape) ? last_rows : 0, width);
            }))
            return error;
        work.last_rows = last_rows, work.spreads = spreads;
    }
    if (longest > work.longest) {
        work.longest = padded(longest + longest / 4, 256);  // more than is needed now, lest every token enlarge it
        for (Block& scratch : work.scratch) free(scratch.memory), scratch = {};
    }
    for (int i = 0; i < threads; i++)
        if (!work.scratch[i].memory)
            if (const int error = lay_out(work.scratch + i, "the workspace of a thread", true,
                                          [&](Dealer& from) { model->variant->lay_scratch(from, &shape, work.longest); }))
                return error;
    return OK;
}

EXPORT void fly_free(Model* model) {
    if (!model) return;
    for (int i = 0; model->layers && i < model->shape.layers; i++) {
        const Layer& layer = model->layers[i];
        for (float* norm : layer.norm) free(norm);
        for (const Matrix* matrix : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) drop(*matrix);
    }
    drop(model->head);
    for (const Matrix* matrix : {&model->fuse, &model->joint, &model->correct}) drop(*matrix);
    free(model->sketch.bits), free(model->sketch.scale);
    for (const Block& scratch : model->work.scratch) free(scratch.memory);
    free(model->work.tile_memory.memory), free(model->work.last_memory.memory);
    free(model->layers), free(model->norm), free(model->cos), free(model->sin), free(model->confidence);
    pthread_mutex_destroy(&model->lock);
    free(model);
}

// Makes a model without matrices, in ``made``. ``norm`` [C]; ``cos``, ``sin`` [ropes, positions, D/2]; ``embedding`` [V, C],
// which must outlive the model, or none.
EXPORT int fly_new(Model** made, int variant, const Shape* shape, Span<const float> norm, Span<const float> cos,
                   Span<const float> sin, Span<const char> embedding) {
    if (const int error = check_variant(variant) ?: check(*shape) ?: holds("norm", norm, shape->width) ?:
                          holds("cos", cos, shape->ropes, shape->positions, shape->head_dim / 2) ?:
                          holds("sin", sin, shape->ropes, shape->positions, shape->head_dim / 2) ?:
                          holds_or_none("embedding", embedding, shape->vocab, shape->width, bytes_of_type(shape->hidden)))
        return error;
    Model* model = (Model*)allocate(sizeof(Model));
    if (!model) return refuse(NO_MEMORY, "a packed model", 0, sizeof(Model));
    pthread_mutex_init(&model->lock, nullptr);
    model->shape = *shape;
    model->variant = variants[variant];
    model->embedding = embedding;
    model->tokens = shape->vocab;
    model->layers = (Layer*)allocate(shape->layers * (int64_t)sizeof(Layer));
    model->norm = vector_of(norm, shape->width, padded(shape->width));
    model->cos = vector_of(cos, cos.count(), cos.count());
    model->sin = vector_of(sin, sin.count(), sin.count());
    if (model->layers && model->norm && model->cos && model->sin) return *made = model, OK;
    fly_free(model);
    return refuse(NO_MEMORY, "a packed model", 0, 2 * cos.bytes);
}

// Makes the model one process's part of a shared model. Of all ``tokens`` of the vocabulary it holds those from
// ``first`` on. Must be called before the model's first call.
EXPORT int fly_share(Model* model, void (*sum)(float*, int64_t), int tokens, int first) {
    if (const int error = within("first", first, 0, tokens - (int64_t)model->shape.vocab)) return error;
    model->sum = sum, model->tokens = tokens, model->first_token = first;
    return OK;
}

// Makes a draft head, or a model with a trimmed head, draft token ids of a target with ``tokens`` ids: output u of the
// head is the target's token ``target[u]``. ``target`` [U] must outlive the model. Must be called before the model's
// first call.
EXPORT int fly_draft_for(Model* model, int tokens, Span<const int64_t> target) {
    const Shape& shape = model->shape;
    if (const int error = within("tokens", tokens, shape.vocab, MAX_COUNT) ?: holds("target", target, shape.vocab) ?:
                          holds("embedding", model->embedding, tokens, shape.width, bytes_of_type(shape.hidden)))
        return error;
    for (int i = 0; i < shape.vocab; i++)
        if (const int error = within("a token id", target[i], 0, tokens - 1, OUTSIDE)) return error;
    if (const int error = within("mask", shape.mask, 0, tokens - 1)) return error;
    model->tokens = tokens, model->target = target;
    return OK;
}

// Gives a parallel head what it takes for the target's hidden states before a mask token: ``hidden`` [F], in the type of
// hidden states, which must outlive the model.
EXPORT int fly_set_masked(Model* model, Span<const char> hidden) {
    const Shape& shape = model->shape;
    if (const int error = holds("hidden states of a mask", hidden, shape.features, bytes_of_type(shape.hidden))) return error;
    model->masked = hidden;
    return OK;
}

// Gives a block drafter, after ``fly_draft_for``, the rows of its Markov head ``before`` [tokens, rank], in the type of hidden
// states, which must outlive the model, and its ``confidence`` head: weights and the bias, float32. None of what it lacks.
EXPORT int fly_set_markov(Model* model, Span<const char> before, Span<const float> confidence) {
    const Shape& shape = model->shape;
    if (const int error = (shape.markov ? holds("before", before, model->tokens, shape.rank, bytes_of_type(shape.hidden)) : OK) ?:
                          (shape.confidence ? holds("confidence", confidence, shape.confidence + 1L) : OK))
        return error;
    model->before = before;
    free(model->confidence);
    model->confidence = vector_of(confidence, confidence.count(), confidence.count());
    return model->confidence ? OK : refuse(NO_MEMORY, "a confidence head", 0, confidence.bytes);
}

// Sets the norms of a layer [NORMS], float32 [C] or [D], or none; its window; and the number of its rotary table.
// ``causal``, ``anchored``: what the places of a block see, in a block drafter (fly.h: Layer).
EXPORT int fly_set_layer(Model* model, int number, Span<const Span<const float>> norms, int window, int rope, int causal,
                         int anchored) {
    const Shape& shape = model->shape;
    if (const int error = within("layer", number, 0, shape.layers - 1) ?: holds("norms", norms, NORMS) ?:
                          within("window", window, 0, INT32_MAX) ?: within("rope", rope, 0, shape.ropes - 1))
        return error;
    Layer& layer = model->layers[number];
    layer.window = window, layer.rope = rope, layer.causal = causal, layer.anchored = anchored;
    for (int which = 0; which < NORMS; which++) {
        if (!norms[which].there()) continue;
        const int width = which == QUERY || which == KEY ? shape.head_dim : shape.width;
        if (const int error = holds("a norm", norms[which], width)) return error;
        free(layer.norm[which]);
        if (!(layer.norm[which] = vector_of(norms[which], width, padded(width))))
            return refuse(NO_MEMORY, "a norm", 0, width * 4L);
    }
    return OK;
}

// Sets matrix ``which``: one of a layer (0 to 3: qkv, o, gate_up, down), the head (4), the matrix that fuses a draft head's
// inputs (5), or one of a Markov head (6: from a row to logits; 7: the joint one). It is [N, K] in the type of the weights,
// with ``bias`` [N] or none. W8A8 has a ``scale`` [N], and no other type has one.
EXPORT int fly_set_matrix(Model* model, int number, int which, Span<const char> data, Span<const float> bias,
                          Span<const float> scale) {
    const Shape& s = model->shape;
    MatrixPlace place;
    if (const int error = place_of(model, number, which, &place) ?:
                          within("weights of this model", s.weights, FLOAT32, W8A8))
        return error;
    const auto [matrix, n, k] = place;
    if (const int error = holds("a matrix", data, n, k, bytes_of_type(s.weights)) ?:
                          holds_or_none("bias", bias, n) ?: holds_or_none("scale", scale, n) ?:
                          within("scale", scale.there(), s.weights == W8A8, s.weights == W8A8))
        return error;
    drop(*matrix);
    *matrix = {};
    const float *own_bias = bias.there() ? bias.at : nullptr, *own_scale = scale.there() ? scale.at : nullptr;
    if (make(matrix, n, k, data.at, own_bias, own_scale, s.weights, which == 2)) return OK;
    return refuse(NO_MEMORY, "a matrix", 0, data.bytes);
}

// Bytes of a model's matrices that a forward of one token reads.
EXPORT int64_t fly_weight_bytes(Model* model) {
    const Sketch& sketch = model->sketch;
    const int panels = sketch.bits ? min_of(LIKELY / 2, model->head.panels) : model->head.panels;
    int64_t bytes = model->head.panel_bytes * panels + (int64_t)sketch.blocks * sketch.eighths * SKETCHED;
    for (int i = 0; i < model->shape.layers; i++) {
        const Layer& layer = model->layers[i];
        for (const Matrix* matrix : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down})
            bytes += matrix->panel_bytes * matrix->panels;
    }
    return bytes;
}

// Bytes of a model's workspace at present.
EXPORT int64_t fly_workspace(Model* model) {
    const Locked locked(model);
    const Workspace& work = model->work;
    int64_t bytes = work.tile_memory.bytes + work.last_memory.bytes;
    for (const Block& scratch : work.scratch) bytes += scratch.bytes;
    return bytes;
}
