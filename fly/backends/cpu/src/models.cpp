// Models: their matrices packed into panels, and the workspace that calls over one share. Knows nothing of the arithmetic
// on either.
#include <initializer_list>

#include "library.h"

using namespace fly;

namespace {

// The row of the checkpoint's matrix that output ``lane`` of a panel is; -1 is padding.
int source_row(int panel, int lane, int n, bool pairs) {
    if (!pairs) return panel * PANEL + lane < n ? panel * PANEL + lane : -1;
    const int half = n / 2, at = panel * (PANEL / 2) + lane % (PANEL / 2);
    return at >= half ? -1 : lane < PANEL / 2 ? at : half + at;
}

float* vector_of(const float* from, int n, int room) {
    float* to = (float*)allocate(room * 4L);
    if (to && from) memcpy(to, from, n * 4L);
    return to;
}

template <class T>
void pack(Matrix* matrix, const T* from, Layout layout, bool pairs) {
    const int k = matrix->k, step = layout.step, together = layout.together, steps = (k + step - 1) / step;
    for (int panel = 0; panel < matrix->panels; panel++) {
        const T* rows[PANEL];
        bool full = step * sizeof(T) == 4;  // an output's step is 4 bytes, and all outputs lie together
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
            for (int first = 0; first < PANEL; first += together)
                for (int j = 0; j < step; j++)
                    for (int lane = first; lane < first + together; lane++, to++)
                        *to = rows[lane] && s * step + j < k ? rows[lane][s * step + j] : (T)0;
    }
}

// A value for each output of a matrix, which ``of`` gives by its row; zeros where there is none.
template <class T, class Of>
bool by_output(const Matrix& matrix, bool pairs, T** to, Of of) {
    if (!(*to = (T*)allocate(matrix.panels * PANEL * (long)sizeof(T)))) return false;
    for (int j = 0; j < matrix.panels * PANEL; j++) {
        const int row = source_row(j / PANEL, j % PANEL, matrix.n, pairs);
        if (row >= 0) (*to)[j] = of(row);
    }
    return true;
}

// ``bias`` and ``scale`` [N] float32 or null.
bool make(Matrix* matrix, int n, int k, const void* data, const float* bias, const float* scale, int type, bool pairs) {
    const Layout layout = layout_of(type);
    const int bytes = type == FLOAT32 ? 4 : type == BFLOAT16 ? 2 : 1;
    matrix->n = n, matrix->k = k;
    matrix->panels = pairs ? padded(n / 2, PANEL / 2) / (PANEL / 2) : padded(n) / PANEL;
    matrix->panel_bytes = (long)padded(k, layout.step) * PANEL * bytes;
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
    return (type != W8A8 || by_output(*matrix, pairs, &matrix->offset, offset)) &&
           (!bias || by_output(*matrix, pairs, &matrix->bias, [=](int row) { return bias[row]; })) &&
           (!scale || by_output(*matrix, pairs, &matrix->scale, [=](int row) { return scale[row]; }));
}

// A larger block in place of one, for what ``deal`` takes of it.
template <class Deal>
bool grow(Block* block, Deal deal) {
    Dealer sizes = {}, dealer = {};
    deal(sizes);
    free(block->memory);
    *block = {(char*)allocate(sizes.used), sizes.used};
    dealer.base = block->memory;
    deal(dealer);
    return block->memory;
}

}  // namespace

bool fly::make_room(Model* model, int tokens, int last_rows, int longest, int threads) {
    const Shape& shape = model->shape;
    Workspace& work = model->work;
    const long act = model->variant->activation_bytes(shape.weights), width = padded(shape.width);
    if (least_of(tokens, MAX_TILE) > work.tile) {
        const long tile = tokens <= 32 ? 32 : MAX_TILE;
        work.tile = 0;
        const Layer& layer = model->layers[0];
        if (!grow(&work.of_tile, [&](Dealer& dealer) {
                const bool drafts = shape.features;
                work.x = dealer.take<float>(tile * width);
                work.embedded = dealer.take<float>(drafts ? tile * width : 0);
                work.given = dealer.take<char>(tile * padded(shape.features) * act);
                work.part = dealer.take<float>(adds_apart(model) ? tile * width : 0);
                work.qkv = dealer.take<float>(tile * layer.qkv.panels * PANEL);
                work.normed = dealer.take<char>((drafts ? 2 : 1) * tile * width * act);
                work.attended = dealer.take<char>(tile * padded(shape.heads * shape.head_dim) * act);
                work.gated = dealer.take<char>(tile * layer.gate_up.panels * (PANEL / 2) * act);
                work.narrow = dealer.take<uint8_t>(shape.weights == W8A8 ? tile * padded(most_inputs(shape), 64) : 0);
                work.steps = dealer.take<float>(tile);
            }))
            return false;
        work.tile = (int)tile;
    }
    if (last_rows > work.last_rows) {
        work.last_rows = 0;
        if (!grow(&work.of_last, [&](Dealer& dealer) {
                work.last = dealer.take<char>(last_rows * width * act);
                work.logits = dealer.take<float>((long)last_rows * shape.vocab);
                work.spread = dealer.take<float>(2L * padded(shape.vocab));
                work.carried = dealer.take<float>(shape.features ? last_rows * width : 0);
            }))
            return false;
        work.last_rows = last_rows;
    }
    if (longest > work.longest) {
        work.longest = 0;
        for (char*& scratch : work.scratch) free(scratch), scratch = nullptr;
        longest = padded(longest + longest / 4, 256);  // it grows with every token, but not the workspace
        work.scratch_bytes = model->variant->scratch_bytes(&shape, longest);
        work.longest = longest;
    }
    for (int i = 0; i < threads; i++)
        if (!work.scratch[i] && !(work.scratch[i] = (char*)allocate(work.scratch_bytes))) return false;
    return true;
}

EXPORT void fly_free(Model* model) {
    if (!model) return;
    const auto drop = [](const Matrix& matrix) {
        for (void* memory : {(void*)matrix.data, (void*)matrix.bias, (void*)matrix.scale, (void*)matrix.offset}) free(memory);
    };
    for (int i = 0; model->layers && i < model->shape.layers; i++) {
        const Layer& layer = model->layers[i];
        for (float* norm : layer.norm) free(norm);
        for (const Matrix* matrix : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) drop(*matrix);
    }
    drop(model->head);
    drop(model->fuse);
    for (char* scratch : model->work.scratch) free(scratch);
    free(model->work.of_tile.memory), free(model->work.of_last.memory);
    free(model->layers), free(model->norm), free(model->cos), free(model->sin);
    pthread_mutex_destroy(&model->lock);
    free(model);
}

// An empty model, null without memory. ``cos``, ``sin`` [ropes, positions, D/2]; ``embedding`` [V, C] must outlive it, or null.
EXPORT Model* fly_new(int variant, const Shape* shape, const float* norm, const float* cos, const float* sin,
                      const void* embedding) {
    Model* model = (Model*)allocate(sizeof(Model));
    if (!model) return nullptr;
    pthread_mutex_init(&model->lock, nullptr);
    const int table = shape->ropes * shape->positions * (shape->head_dim / 2);
    model->shape = *shape;
    model->variant = variants[variant];
    model->embedding = embedding;
    model->tokens = shape->vocab;
    model->layers = (Layer*)allocate(shape->layers * (long)sizeof(Layer));
    model->norm = vector_of(norm, shape->width, padded(shape->width));
    model->cos = vector_of(cos, table, table);
    model->sin = vector_of(sin, table, table);
    if (model->layers && model->norm && model->cos && model->sin) return model;
    fly_free(model);
    return nullptr;
}

// Share the model with other processes, before its first call: of all ``tokens`` it holds those from ``first`` on.
EXPORT void fly_share(Model* model, void (*sum)(float*, int64_t), int tokens, int first) {
    model->sum = sum, model->tokens = tokens, model->first_token = first;
}

// Make it a draft head of a target of so many ``tokens``, whose ids of its own are ``target`` [U], which must outlive it;
// before its first call.
EXPORT void fly_draft_for(Model* model, int tokens, const int64_t* target) { model->tokens = tokens, model->target = target; }

// The norms of a layer, float32 [C] or [D], or null; its window, and which of the tables it rotates by.
EXPORT int fly_set_layer(Model* model, int number, const float* const* norms, int window, int rope) {
    Layer& layer = model->layers[number];
    layer.window = window, layer.rope = rope;
    for (int which = 0; which < NORMS; which++) {
        const int width = which == QUERY || which == KEY ? model->shape.head_dim : model->shape.width;
        if (norms[which] && !(layer.norm[which] = vector_of(norms[which], width, padded(width)))) return NO_MEMORY;
    }
    return OK;
}

// Matrix ``which`` of a layer (qkv, o, gate_up, down), the head (4), or what fuses a draft head's inputs (5): [N, K] in the type of the weights.
EXPORT int fly_set_matrix(Model* model, int number, int which, int n, int k, const void* data, const float* bias,
                          const float* scale) {
    Layer& layer = model->layers[number];
    Matrix* all[] = {&layer.qkv, &layer.o, &layer.gate_up, &layer.down, &model->head, &model->fuse};
    return make(all[which], n, k, data, bias, scale, model->shape.weights, which == 2) ? OK : NO_MEMORY;
}

// Bytes of a model's workspace at present.
EXPORT int64_t fly_workspace(Model* model) {
    const Workspace& work = model->work;
    int64_t bytes = work.of_tile.bytes + work.of_last.bytes;
    for (const char* scratch : work.scratch) bytes += scratch ? work.scratch_bytes : 0;
    return bytes;
}
