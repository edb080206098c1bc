// From hidden states to logits: by the whole head, or by the part of it that a sketch chooses. Called by all threads of a call
// (decoder.h, drafting.h), which meet at a barrier before and after. Knows nothing of what the logits are used for.

// Inputs are rounded to whole numbers from -FINE to FINE times a step. The sum of four of them and SIGNED / 2 is 0 to SIGNED, so
// a byte holds two such sums, and 16 bits hold those of EIGHTHS bytes.
constexpr int FINE = 15, SIGNED = 8 * FINE, EIGHTHS = 65535 / (2 * SIGNED);

// Writes what ``signed_sums`` looks up: for every four inputs, SIGNED / 2 plus their sum with each choice of signs.
template <class Act>
inline void lay_tables(const Act* a, int count, uint8_t* tables) {
    Vec most = zero();
    for (int i = 0; i < count; i += W) most = larger(most, abs_of(ld(a + i)));  // rows are padded with zeros
    const float peak = largest(most);
    const Vec inverse = set1(peak > 0 ? FINE / peak : 0.0f);
    for (int from = 0; from < count; from += 16) {
        alignas(64) int8_t input[16];
        for (int i = 0; i < 16; i += W) st(input + i, nearest(ld(a + from + i) * inverse));
        for (int i = 0; i < 16 && from + i < padded(count, 8); i += 4) {
            uint8_t* table = tables + (from + i) / 4 * 16;
            for (int signs = 0; signs < 16; signs++) {
                int sum = SIGNED / 2;
                for (int j = 0; j < 4; j++) sum += signs >> j & 1 ? input[i + j] : -input[i + j];
                table[signs] = (uint8_t)sum;
            }
        }
    }
}

// Writes the sketched logits of 64 outputs: each is the sum of the inputs with the signs of its weights, times its scale.
inline void sketch_block(const Sketch& sketch, int block, const uint8_t* tables, float* to) {
    uint16_t sums[SKETCHED];
    for (int i = 0; i < SKETCHED; i++) to[i] = 0;
    for (int from = 0; from < sketch.eighths; from += EIGHTHS) {
        const int count = min_of(sketch.eighths - from, EIGHTHS);
        signed_sums(sketch.bits + ((long)block * sketch.eighths + from) * SKETCHED, tables + from * 32L, count, sums);
        for (int i = 0; i < SKETCHED; i++) to[i] += (float)(sums[i] - count * SIGNED);
    }
    const float* scale = sketch.scale + block * SKETCHED;
    for (int i = 0; i < SKETCHED; i += W) st(to + i, ld(to + i) * ld(scale + i));
}

// Logits of rows of normalised hidden states by a head with a sketch. The sketch, which is the head in one bit a weight, finds
// the strips with the largest logits. The logits of these LIKELY strips are computed by the head, just as without a
// sketch; all others are -inf. Which strips these are depends on the row alone. (SVD-softmax, Shim et al., NIPS 2017, has a
// matrix of fewer columns for the same purpose.)
template <class Wt>
void project_likely(Call* call, const typename Wt::Act* a, int rows, float* logits, int thread, const Scratch& s) {
    const Model* model = call->model;
    const Workspace& work = model->work;
    const Matrix& head = model->head;
    const Sketch& sketch = model->sketch;
    const int vocab = model->shape.vocab, width = model->shape.width, strips = strips_of(sketch);
    const int last = padded(vocab, STRIP) / STRIP;  // the end of the strips that have tokens
    const long ldx = padded(width), table_bytes = sketch.eighths * 32L;
    for (int from = 0; from < rows; from += LIKELY_ROWS) {
        if (from) wait(call);
        const int chunk = min_of(rows - from, LIKELY_ROWS);
        const auto logits_of = [&](int row, int strip) { return logits + (long)(from + row) * vocab + strip * STRIP; };
        const auto tokens_of = [&](int strip) { return max_of(min_of(vocab - strip * STRIP, STRIP), 0); };
        // Sketch: note the largest sketched logit of each strip. Threads take blocks turn by turn.
        const Range mine = part(chunk, thread, call->threads);
        for (int row = mine.from; row < mine.to; row++) lay_tables(a + (from + row) * ldx, width, work.tables + row * table_bytes);
        wait(call);
        constexpr int TURN = 16;
        for (int first; (first = __atomic_fetch_add(&call->taken, TURN, __ATOMIC_RELAXED)) < sketch.blocks;)
            for (int block = first; block < min_of(first + TURN, sketch.blocks); block++)
                for (int row = 0; row < chunk; row++) {
                    alignas(64) float found[SKETCHED];
                    sketch_block(sketch, block, work.tables + row * table_bytes, found);
                    for (int i = 0; i < SKETCHED / STRIP; i++) {
                        const int strip = block * (SKETCHED / STRIP) + i, tokens = tokens_of(strip);
                        for (int n = tokens; n < STRIP; n++) found[i * STRIP + n] = -__builtin_inff();
                        Vec most = ld(found + i * STRIP);
                        for (int n = W; n < STRIP; n += W) most = larger(most, ld(found + i * STRIP + n));
                        work.peaks[row * (long)strips + strip] = largest(most);
                        for (int n = 0; n < tokens; n++) logits_of(row, strip)[n] = -__builtin_inff();
                    }
                }
        const Inputs<Wt> x = inputs_of<Wt>(call, thread, s, a + from * ldx, ldx, chunk, head.k);
        wait(call);
        // Choose: keep the strips from the LIKELY-th largest peak up; equal peaks all stay.
        for (int row = mine.from; row < mine.to; row++) {
            float* peaks = work.peaks + row * (long)strips;
            for (int strip = sketch.blocks * (SKETCHED / STRIP); strip < strips; strip++) peaks[strip] = -__builtin_inff();
            const float least = least_kept(peaks, nullptr, strips, peaks[best(peaks, strips)], LIKELY);
            int count = 0;
            for (int strip = 0; strip < last; strip++)
                if (peaks[strip] >= least) work.likely[row * (long)strips + count++] = strip;
            work.likely_count[row] = count;
        }
        wait(call);
        // Compute: each thread takes its part of each row's strips.
        for (int row = 0; row < chunk; row++) {
            const int32_t* likely = work.likely + row * (long)strips;
            const Range part_of = part(work.likely_count[row], thread, call->threads);
            for (int at = part_of.from; at < part_of.to; at++) {
                alignas(64) float sums[STRIP];
                const int strip = likely[at];
                const char* fetch_from = at + 1 < part_of.to ? head.strips[likely[at + 1]].data : nullptr;
                multiply_rows<Wt::MAX_BLOCK.rows>(1, (const int8_t*)x.a + row * x.lda, x.lda, x.steps + row * x.lds, x.lds,
                                              head.strips[strip], head.k, fetch_from, sums);
                memcpy(logits_of(row, strip), sums, tokens_of(strip) * sizeof(float));
            }
        }
    }
}

// Logits of rows of normalised hidden states.
template <class Wt>
void project(Call* call, const typename Wt::Act* a, int rows, float* logits, int thread) {
    const Model* model = call->model;
    const Matrix& head = model->head;
    const int vocab = model->shape.vocab;
    const long ldx = padded(model->shape.width);
    const Scratch s = scratch_of(model, thread);
    if constexpr (Wt::TYPE == GROUPED)
        if (model->sketch.bits) return project_likely<Wt>(call, a, rows, logits, thread, s);
    for (int from = 0; from < rows; from += MAX_TILE) {  // there is room for rounding so many rows at once
        if (from) wait(call);
        const int chunk = min_of(rows - from, MAX_TILE);
        const bool drafts = from + chunk == rows && call->job != LOGITS;  // the next product may be that of a drafted token
        const Matrix& next = drafts ? model->layers[0].qkv : head;
        product<Wt>(call, thread, s, a + from * ldx, ldx, chunk, head, next, [&](int row, int panel, const float* sums) {
            memcpy(logits + (long)(from + row) * vocab + panel * PANEL, sums, min_of(vocab - panel * PANEL, PANEL) * 4L);
        });
    }
}
