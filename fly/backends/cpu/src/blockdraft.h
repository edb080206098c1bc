// How a head drafts all tokens at once (``draft_at_once``, at the end of this file). A block drafter (fly/models/dflash.py) reads
// the context, and then runs one forward over a block of each row. A parallel head (fly/models/eagle.py: P-EAGLE) runs one
// forward over the context and mask tokens after it. Then the tokens of all places are chosen. Called by each thread of a
// call. Knows nothing of who verifies the tokens.

// The panels of a layer's matrix that hold its keys and values. The first panel may hold queries too.
inline Matrix keys_and_values(const Shape& shape, const Matrix& qkv, int* first) {
    const int from = *first = shape.heads * shape.head_dim / PANEL;
    Matrix part = qkv;
    part.panels -= from;
    part.data += from * qkv.panel_bytes;
    if (qkv.bias) part.bias += from * PANEL;
    if (qkv.scale) part.scale += from * PANEL;
    if (qkv.offset) part.offset += from * PANEL;
    if (qkv.strips) part.strips += 2 * from, part.data = (char*)part.strips->data;
    return part;
}

// Reads the context: stores its keys and values in all layers. Every layer makes its own from the same features, without
// its input norm (arXiv 2602.06036).
template <class Wt, class K, class H>
void read_context(Call* call, int thread) {
    Model* model = call->model;
    const Shape& shape = model->shape;
    const Workspace& work = model->work;
    const Scratch s = scratch_of(model, thread);
    const long ldx = padded(shape.width), ld_qkv = (long)model->layers[0].qkv.panels * PANEL;
    for (;;) {
        int first;
        Matrix mine = keys_and_values(shape, model->layers[0].qkv, &first);
        fuse<Wt, H>(call, thread, s, part(call->tile_tokens, thread, call->threads), mine);
        const typename Wt::Act* normed = normalised<Wt>(call, model->layers[0].norm[FEATURE], thread, s);
        const Inputs<Wt> features = inputs_of<Wt>(call, thread, s, normed, ldx, call->tile_tokens, shape.width);
        for (int number = 0; number < shape.layers; number++) {
            const bool last = number + 1 == shape.layers;
            const Matrix next = last ? model->layers[0].qkv : keys_and_values(shape, model->layers[number + 1].qkv, &first);
            product<Wt>(call, thread, features, mine, next, [&](int row, int panel, const float* sums) {
                memcpy(work.qkv + row * ld_qkv + (first + panel) * PANEL, sums, PANEL * sizeof(float));
            });
            wait(call);
            const Range range = part(call->piece_count * shape.kv_heads, thread, call->threads);
            for (int task = range.from; task < range.to; task++)
                store<K>(call, call->pieces[task / shape.kv_heads], number, task % shape.kv_heads);
            wait(call);
            mine = next;
        }
        if (call->tile_at + call->tile_tokens == call->tokens) return;
        wait(call);  // all have seen that a tile is left
        if (!thread) next_tile(call);
        wait(call);
    }
}

// Makes the rows' blocks the tokens of the call. A block begins at the row's last token, the anchor, and follows the context.
inline void lay_blocks(Call* call) {
    const Shape& shape = call->model->shape;
    int known = 0, laid = 0;
    for (int b = 0; b < call->rows; b++) {
        Row& row = call->row[b];
        known += row.count;
        call->anchor[b] = call->token[known - 1];
        row.start += row.count, row.count = shape.block;
        for (int n = 0; n < shape.block; n++, laid++) {
            call->live_token[laid] = n ? shape.mask : call->anchor[b];
            call->live_position[laid] = row.start + n;
        }
    }
    call->in_blocks = true;
    feed_live(call, laid);
}

// Adds mask tokens to each row: its last token and the mask tokens draft one token each.
inline void lay_masks(Call* call) {
    int known = 0, laid = 0;
    for (int b = 0; b < call->rows; b++) {
        Row& row = call->row[b];
        const int masks = call->limit[b] - 1;
        for (int n = 0; n < row.count; n++, known++, laid++) {
            call->live_token[laid] = call->token[known];
            call->live_position[laid] = call->position[known];
            call->head_state_at[laid] = known;
        }
        for (int n = 0; n < masks; n++, laid++) {
            call->live_token[laid] = call->model->shape.mask;
            call->live_position[laid] = call->live_position[laid - 1] + 1;
            call->head_state_at[laid] = -1;
        }
        row.count += masks;
    }
    feed_live(call, laid);
}

// Multiplies the inputs of ``rows`` rows, ``ld`` values apart, with a matrix of a Markov head.
template <class Wt, class Finish>
inline void product_of_rows(Call* call, int thread, const Scratch& s, const void* a, long ld, int rows, const Matrix& matrix,
                            Finish finish) {
    for (int from = 0; from < rows; from += MAX_TILE) {  // there is room for rounding so many rows at once
        if (from) wait(call);
        product<Wt>(call, thread, s, (const typename Wt::Act*)a + from * ld, ld, min_of(rows - from, MAX_TILE), matrix, matrix,
                    [&](int row, int panel, const float* sums) { finish(from + row, panel, sums); });
    }
    wait(call);
}

inline float sigmoid(float x) {
    alignas(64) float all[W];
    st(all, exponential(set1(-x)));
    return 1 / (1 + all[0]);
}

// Corrects the logits of place ``n`` of the live rows by the token before it (fly/models/dflash.py: MarkovHead). With n = -1
// it only takes a RECURRENT head from the anchor's place to the next one.
template <class Wt, class H>
void correct(Call* call, int thread, const Scratch& s, int n) {
    typedef typename Wt::Act Act;
    Model* model = call->model;
    const Shape& shape = model->shape;
    const int rank = shape.rank, rows = call->live_rows, width = shape.width;
    const long ldr = padded(rank), ldx = padded(width), ldj = (long)model->joint.panels * PANEL, ldi = padded(model->joint.k);
    const Range mine = part(rows, thread, call->threads);
    for (int i = mine.from; i < mine.to; i++) {
        const int b = call->live_row[i];
        const int64_t token = n > 0 ? call->drafted[(long)b * call->most + n - 1] : call->anchor[b];
        float* before = call->before + b * ldr;
        convert((const H*)model->before.at + token * rank, rank, before, (int)ldr);
        if (shape.markov == VANILLA) {
            convert(before, (int)ldr, (Act*)call->correct_in + i * ldr);
            continue;
        }
        const Act* hidden = (const Act*)model->work.last + (n < 0 ? call->kept_at[call->rows] + b : call->kept_at[b] + n) * ldx;
        Act* to = (Act*)call->joint_in + i * ldi;
        if (shape.markov == GATED) {
            convert(hidden, width, to);
            convert(before, rank, to + width, (int)ldi - width);
        } else {
            convert(call->memory + b * ldr, rank, to);
            convert(before, rank, to + rank);
            convert(hidden, width, to + 2 * rank, (int)ldi - 2 * rank);
        }
    }
    wait(call);
    if (shape.markov != VANILLA) {
        product_of_rows<Wt>(call, thread, s, call->joint_in, ldi, rows, model->joint, [&](int i, int panel, const float* sums) {
            memcpy(call->joined + i * ldj + panel * PANEL, sums, PANEL * sizeof(float));
        });
        for (int i = mine.from; i < mine.to; i++) {
            const int b = call->live_row[i];
            const float *joined = call->joined + i * ldj, *before = call->before + b * ldr;
            float* state = call->memory + b * ldr;
            Act* to = (Act*)call->correct_in + i * ldr;
            for (int j = 0; j < rank; j++) {
                const float gate = sigmoid(joined[j]);
                const auto tanh = [](float x) { return 2 * sigmoid(2 * x) - 1; };
                float out = before[j] * gate;
                if (shape.markov == RECURRENT) {
                    out = tanh(joined[2 * rank + j]);
                    state[j] = gate * state[j] + (1 - gate) * tanh(joined[rank + j]);
                }
                convert(&out, 1, to + j, j + 1 == rank ? (int)ldr - j : 0);
            }
        }
        wait(call);
    }
    if (n < 0) return;
    const int vocab = shape.vocab;
    product_of_rows<Wt>(call, thread, s, call->correct_in, ldr, rows, model->correct, [&](int i, int panel, const float* sums) {
        float* logits = model->work.logits + (long)(call->kept_at[call->live_row[i]] + n) * vocab + panel * PANEL;
        for (int j = 0; j < min_of(vocab - panel * PANEL, PANEL); j++) logits[j] += sums[j];
    });
}

// The chance that the token at place ``n`` of row ``b`` is kept, as the confidence head says.
template <class Act>
float confidence_of(const Call* call, int b, int n) {
    const Model* model = call->model;
    const Shape& shape = model->shape;
    const Act* hidden = (const Act*)model->work.last + (call->kept_at[b] + n) * (long)padded(shape.width);
    Vec all = zero();
    for (int i = 0; i < shape.width; i += W) all = fma(ld(hidden + i), ld(model->confidence + i), all);
    float total = sum(all) + model->confidence[shape.confidence];
    for (int i = shape.width; i < shape.confidence; i++)
        total += call->before[b * (long)padded(shape.rank) + i - shape.width] * model->confidence[i];
    return sigmoid(total);
}

// Chooses the tokens place by place: each depends on the token before it.
template <class Wt, class H>
void walk_places(Call* call, int thread, float* spread) {
    const Shape& shape = call->model->shape;
    const Scratch s = scratch_of(call->model, thread);
    if (shape.markov == RECURRENT && shape.first) correct<Wt, H>(call, thread, s, -1);
    for (int n = 0; call->live_rows; n++) {
        if (shape.markov) correct<Wt, H>(call, thread, s, n);
        for (int i = thread; i < call->live_rows; i += call->threads) {
            const int b = call->live_row[i];
            const long at = (long)b * call->most + n;
            const float* logits = call->model->work.logits + (long)(call->kept_at[b] + n) * shape.vocab;
            float chance = 1;
            call->drafted[at] = choose(call, b, n, logits, spread, chance);
            call->chance[at] = shape.confidence ? confidence_of<typename Wt::Act>(call, b, n) : chance;
        }
        wait(call);
        if (!thread) {
            int live = 0;
            for (int i = 0; i < call->live_rows; i++) {
                const int b = call->live_row[i];
                const long at = (long)b * call->most + n;
                if (add_token(call, b, call->drafted[at], call->chance[at])) call->live_row[live++] = b;
            }
            call->live_rows = live;
        }
        wait(call, false);
    }
}

// Chooses the tokens of all places at once: none depends on another.
inline void choose_all(Call* call, int thread, float* spread) {
    int b = 0;
    for (int i = thread; i < call->kept_at[call->rows]; i += call->threads) {
        while (i >= call->kept_at[b + 1]) b++;
        const int n = i - call->kept_at[b];
        const long at = (long)b * call->most + n;
        call->chance[at] = 1;
        call->drafted[at] = choose(call, b, n, call->model->work.logits + (long)i * call->model->shape.vocab, spread, call->chance[at]);
    }
    wait(call);
    for (b = 0; !thread && b < call->rows; b++) {
        long at = (long)b * call->most;
        while (add_token(call, b, call->drafted[at], call->chance[at])) at++;
    }
}

// The whole draft: the context, the blocks or mask tokens, their logits, and the tokens. The job PLACES ends with the logits.
template <class Wt, class K, class H>
void draft_at_once(Call* call, int thread) {
    Model* model = call->model;
    const Shape& shape = model->shape;
    typename Wt::Act* last = (typename Wt::Act*)model->work.last;
    if (shape.block) read_context<Wt, K, H>(call, thread);
    wait(call);  // all have seen that no tile is left
    if (!thread) shape.block ? lay_blocks(call) : lay_masks(call);
    wait(call, false);
    tiles<Wt, K, H>(call, thread, call->job == DRAFT ? last : nullptr);
    wait(call);
    if (call->job == PLACES) return project_all<Wt, H>(call, thread);
    project<Wt>(call, last, call->kept_at[call->rows], model->work.logits, thread);
    wait(call);
    float* spread = model->work.spread + thread * 2L * padded(shape.vocab);
    if (shape.markov || shape.confidence)
        walk_places<Wt, H>(call, thread, spread);
    else
        choose_all(call, thread, spread);
}
