// Rounds of speculative decoding in one call: draft, score, and verify what was drafted. Knows nothing of how a model
// computes its logits, nor of why a row goes through rounds.
#include <math.h>

#include "trees.h"

using namespace fly;

namespace {

// The arrays of a forward over some of the rows of ``of``, whose rows are filled in one by one.
struct Packed {
    Batch batch;
    int32_t *start, *count, *table_at, *row;
    int64_t *token, *position;
    const int32_t* all_tables;

    static long bytes(long rows, long tokens) { return rows * 4 * 4 + tokens * 16 + 6 * 64; }

    Packed(Arena* arena, const Batch* of, long tokens) : batch(*of), all_tables(of->table_at) {
        batch.start = start = arena->take<int32_t>(of->rows), batch.count = count = arena->take<int32_t>(of->rows);
        batch.table_at = table_at = arena->take<int32_t>(of->rows), row = arena->take<int32_t>(of->rows);
        batch.token = token = arena->take<int64_t>(tokens), batch.position = position = arena->take<int64_t>(tokens);
    }

    void clear() { batch.rows = batch.tokens = 0; }

    // The tokens ``from`` to ``to`` of row ``b``, of which those before ``first`` are not held.
    void add(int b, const int64_t* text, int from, int to, int first = 0) {
        const int i = batch.rows++;
        row[i] = b, start[i] = from - first, count[i] = to - from, table_at[i] = all_tables[b];
        for (int at = from; at < to; at++) token[batch.tokens] = text[at], position[batch.tokens++] = at - first;
    }
};

// Rounds under way, and what only they need.
struct Play {
    Rounds* it;
    Model *target, *drafter;
    Lookup* lookup;
    int rows, vocab, k, new_tokens, stops;
    const long state_bytes;  // of the target's hidden states of a token, where they are asked for
    const bool heads;        // whether the drafter is a head, which drafts by them
    Arena arena;
    Packed scored, draft;
    int32_t *limit, *drafts, *proposed, *stop_at, *choice;  // drafts of each row, limit and proposed of each drafted for
    int64_t *stop, *chain;
    float* coins;
    Sampling* drawing;
    Sure* sure;
    const int32_t** texts;
    // Of a draft head: what a forward is given of hidden states, and where those of each row's tokens lie that it has not
    // stored.
    char* given;
    const char** states;
    int32_t longest;  // tokens that a row of this round drafts
    Forest* forest;   // where drafts are trees
    int64_t* sibling;  // what may follow one place of a tree, and which nodes they are
    int32_t* node;
    uint8_t* mask;
    const uint8_t** masks;

    Play(Rounds* rounds, Model* whose, const Batch* batch, Model* who, const Batch* draft_batch, Lookup* looks, long late,
         Forest* trees, long seen)
        : it(rounds), target(whose), drafter(who), lookup(looks), rows(batch->rows), vocab(whose->shape.vocab), k(it->k),
          new_tokens(rows * (k + 1)), stops(it->stop_at[rows]),
          state_bytes(it->states * whose->shape.width * (whose->shape.hidden == FLOAT32 ? 4L : 2L)),
          heads(who && who->shape.features),
          arena(Packed::bytes(rows, new_tokens) + Packed::bytes(rows, late) +
                rows * (4 * 4 + 2 * 8L + sizeof(Sampling) + sizeof(Sure)) + stops * 8L + new_tokens * (8 + 4 + 4L) +
                (heads ? late * state_bytes : 0) + (trees ? rows * 8 + k * 12L + seen : 0) + 17 * 64),
          scored(&arena, batch, new_tokens), draft(&arena, drafter ? draft_batch : batch, late), forest(trees) {
        limit = arena.take<int32_t>(rows), drafts = arena.take<int32_t>(rows);
        proposed = arena.take<int32_t>(rows), stop_at = arena.take<int32_t>(rows + 1);
        stop = arena.take<int64_t>(stops), chain = arena.take<int64_t>(new_tokens);
        choice = arena.take<int32_t>(new_tokens), coins = arena.take<float>(new_tokens);
        drawing = arena.take<Sampling>(rows), sure = arena.take<Sure>(rows), texts = arena.take<const int32_t*>(rows);
        given = arena.take<char>(heads ? late * state_bytes : 0), states = arena.take<const char*>(rows);
        sibling = arena.take<int64_t>(forest ? k : 0), node = arena.take<int32_t>(forest ? k : 0);
        mask = arena.take<uint8_t>(forest ? seen : 0), masks = arena.take<const uint8_t*>(forest ? rows : 0);
        const char* from = (const char*)it->given;
        for (int b = 0; heads && b < rows; b++) {
            states[b] = from;
            from += (it->going[b].length - it->going[b].draft_start) * state_bytes;
        }
    }

    // Whether ``token`` ends row ``b``.
    bool ends(int b, int64_t token) const {
        bool found = false;
        for (int s = it->stop_at[b]; s < it->stop_at[b + 1]; s++) found |= it->stop[s] == token;
        return found;
    }

    // Where what row ``b`` comes to in this round lies, and what it drafts.
    long place(int b) const { return (long)b * it->most + it->rounds; }
    int64_t* drafted_of(int b) const { return it->drafted + place(b) * k; }
    int32_t* parents_of(int b) const { return it->parent + place(b) * k; }
    int32_t* path_of(int b) const { return it->path + place(b) * k; }

    // Where the hidden states of this round's tokens lie.
    char* read() const { return it->read ? (char*)it->read + it->read_before * state_bytes : nullptr; }

    // Which rows draft, and what is copied where nobody else drafts.
    void plan() {
        longest = 0;
        draft.clear();
        for (int b = 0; b < rows; b++) {
            const Going& row = it->going[b];
            const int most = least_of(least_of(row.k, row.left - 1), row.context - row.length);
            drafts[b] = 0;
            if (most <= 0) continue;
            if (drafter) {
                const int i = draft.batch.rows;
                const long known = draft.batch.tokens * state_bytes;
                if (heads) memcpy(given + known, states[b], (row.length - row.draft_start) * state_bytes);
                draft.add(b, row.text, row.draft_start, row.length, row.first);
                texts[i] = row.copied;
                limit[i] = most, longest = most_of(longest, most);
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

    // Has the drafter draft. Returns its error or OK.
    int propose() {
        const int asked = draft.batch.rows;
        stop_at[0] = 0;
        for (int i = 0; i < asked; i++) {
            const int b = draft.row[i];
            stop_at[i + 1] = stop_at[i];
            for (int s = it->stop_at[b]; s < it->stop_at[b + 1]; s++) stop[stop_at[i + 1]++] = it->stop[s];
            sure[i] = it->sure[b];
            if (!it->sampling) continue;
            const int64_t seed = derived(it->going[b].seed, it->going[b].length);
            drawing[i] = it->sampling[b];
            for (int n = 0; n < limit[i]; n++) uniforms(seed, it->going[b].length + n, SAMPLE, 1, coins + i * longest + n);
        }
        if (forest) return grow();
        if (const int error = fly_draft(drafter, &draft.batch, longest, limit, stop, stop_at, chain, proposed,
                                        it->sampling ? drawing : nullptr, coins, it->distributions, lookup, texts, sure,
                                        heads ? given : nullptr))
            return error;
        for (int i = 0; i < asked; i++) {
            const int b = draft.row[i], n = drafts[b] = proposed[i];
            Going& row = it->going[b];
            const int64_t* tokens = chain + i * longest;
            row.draft_start = row.length + (heads ? 0 : n - 1);  // the last is not stored; a head's own features do not stay
            memcpy(drafted_of(b), tokens, n * sizeof(int64_t));
            memcpy(row.text + row.length, tokens, n * sizeof(int64_t));
        }
        return OK;
    }

    // The same of trees.
    int grow() {
        if (const int error = forest->grow(draft.batch, limit, stop, stop_at, heads ? given : nullptr)) return error;
        for (int i = 0; i < draft.batch.rows; i++) {
            const int b = draft.row[i], n = drafts[b] = forest->propose(i, drafted_of(b), parents_of(b));
            Going& row = it->going[b];
            row.draft_start = row.length;
            memcpy(row.text + row.length, drafted_of(b), n * sizeof(int64_t));
        }
        return OK;
    }

    // Has the target score the rows' last tokens and what was drafted. Returns its error or OK.
    int score() {
        scored.clear();
        uint8_t* sees = mask;
        for (int b = 0; b < rows; b++) {
            const int length = it->going[b].length, n = drafts[b], first = scored.batch.tokens + 1;
            scored.add(b, it->going[b].text, length - 1, length + n);
            if (!forest) continue;
            const int32_t* parents = parents_of(b);
            masks[b] = n ? sees : nullptr;
            for (int t = -1; t < n && n; t++, sees += length + n) {
                see(sees, length, n, parents, t);
                if (t >= 0) scored.position[first + t] = scored.position[first + parents[t]] + 1;
            }
            scored.batch.masks = masks;
        }
        return fly_score(target, &scored.batch, nullptr, scored.batch.tokens, it->logits, choice, it->state, it->states, read());
    }

    // Whether a clause holds at the mismatch ``n``, where the largest logits are ``top`` and all of them have that
    // ``total``.
    bool holds(const Clause& clause, int b, const int64_t* drafted, const int32_t* own, int n, const float* top, int best) const {
        if (clause.kind == ENTROPY) {  // as ``_entropy`` of host.py
            double entropy = 0, total = top[best];
            for (int i = 0; i < best; i++)
                if (top[i] > -__builtin_inff()) entropy -= exp(top[i] - total) * (top[i] - total);
            return entropy >= clause.theta;
        }
        if (clause.kind == ROOM_LEFT) return n + 1 + clause.count <= drafts[b];
        if (clause.kind == CONTROL) return it->control[drafted[n]];
        bool same = n + clause.count < drafts[b];  // WINDOW
        for (int i = n + 1; same && i <= n + clause.count; i++) same = drafted[i] == own[i];
        return same;
    }

    // Drafted tokens of row ``b`` that stand from the mismatch at ``n`` on: those that the clauses excuse, and those that
    // match.
    int excuse(int b, const float* logits, const int64_t* drafted, const int32_t* own, int n) {
        const Clause* clauses = it->clause + it->going[b].clause_at;
        const int count = it->going[b].clauses, best = least_of(vocab, 3);
        while (n < drafts[b]) {
            float top[4];
            variants[it->variant]->top(logits + (long)n * vocab, vocab, best, top);
            const double total = top[best], logit = logits[(long)n * vocab + drafted[n]];
            uint32_t held = 0;
            for (int c = 0; c < count; c++)
                held |= (uint32_t)(holds(clauses[c], b, drafted, own, n, top, best) != (bool)clauses[c].negated) << c;
            const bool excused = held == (uint32_t)((1ull << count) - 1) && logit != -__builtin_inf();
            it->ask[it->asks++] = {b, it->rounds, n, held, excused, total - logit};
            if (!excused) break;
            for (n++; n < drafts[b] && drafted[n] == own[n];) n++;
        }
        return n;
    }

    // Of row ``b``'s tree, whether the clauses excuse ``at``, which does not match: along a path through it to a token that
    // none follows, as if that were a chain. What they say of it is noted: of each, whether it holds along any.
    bool excuse_node(int b, const float* top, double logit, const int32_t* own, int at) {
        const Clause* clauses = it->clause + it->going[b].clause_at;
        const int count = it->going[b].clauses, best = least_of(vocab, 3);
        const int64_t* drafted = drafted_of(b);
        const int32_t* parents = parents_of(b);
        uint32_t anywhere = 0;
        bool excused = false;
        for (int leaf = drafts[b] - 1; leaf >= at; leaf--) {
            bool last = true;
            for (int t = leaf + 1; last && t < drafts[b]; t++) last = parents[t] != leaf;
            int after = 0, t = leaf;  // tokens of the path after this one
            for (; last && t > at; after++) t = parents[t];
            if (!last || t != at) continue;
            uint32_t held = 0;
            for (int c = 0; c < count; c++) {
                bool says = true;
                if (clauses[c].kind == ROOM_LEFT) says = after >= clauses[c].count;
                else if (clauses[c].kind == WINDOW) {
                    says = after >= clauses[c].count;
                    for (int to = leaf, n = after; says && to > at; n--, to = parents[to])
                        says = n > clauses[c].count || drafted[to] == own[parents[to] + 1];
                } else says = holds(clauses[c], b, drafted, own, at, top, best);
                held |= (uint32_t)(says != (bool)clauses[c].negated) << c;
            }
            anywhere |= held;
            excused |= held == (uint32_t)((1ull << count) - 1) && logit != -__builtin_inf();
        }
        it->ask[it->asks++] = {b, it->rounds, at, anywhere, excused, excused ? top[best] - logit : 0};
        return excused;
    }

    // How many tokens of row ``b``'s tree stand, as ``verify``: from each place on to the first to follow that matches, or
    // else to the first that is excused.
    int walk(int b, const float* logits, const int32_t* own) {
        const Variant* judge = variants[it->variant];
        const Going& row = it->going[b];
        const int64_t* drafted = drafted_of(b);
        const int32_t* parents = parents_of(b);
        int32_t* path = path_of(b);
        const bool draws = it->sampling && it->sampling[b].temperature > 0;
        float uniform = 0;
        if (draws) uniforms(row.seed, row.length, SAMPLE, 1, &uniform);
        for (int n = 0, at = -1;; n++) {
            const float* here = logits + (long)(at + 1) * vocab;
            int64_t& following = it->following[place(b)] = own[at + 1];
            int next = -1, count = 0;
            for (int t = at + 1; t < drafts[b]; t++) {
                if (parents[t] != at) continue;
                node[count] = t, sibling[count++] = drafted[t];
                if (next < 0 && drafted[t] == following) next = t;
            }
            if (draws) {
                uniforms(row.seed, row.length, ACCEPT, drafts[b], coins);
                for (int i = 0; i < count; i++) coins[i] = coins[node[i]];  // none lies before its own number
                const int kept = judge->siblings(here, vocab, it->sampling + b, sibling, coins, count, uniform, it->spread,
                                                 &following);
                next = kept < 0 ? -1 : node[kept];
            }
            if (next < 0 && count && it->decide) {
                *it->stands = UNANSWERED;
                it->decide(it->rounds);
                return *it->stands;
            }
            if (next < 0 && count && row.clauses) {
                const int asked = it->asks, best = least_of(vocab, 3);
                float top[4];
                judge->top(here, vocab, best, top);
                for (int i = 0; i < count && next < 0; i++)
                    if (excuse_node(b, top, here[sibling[i]], own, node[i])) next = node[i];
                if (next >= 0) it->ask[asked] = it->ask[it->asks - 1], it->asks = asked + 1;  // others are as if not tried
            }
            if (next < 0) return n;
            path[n] = at = next;
        }
    }

    // Of row ``b``'s tree, which begins with its last token at ``at`` in the target's forward and is number ``i`` of the
    // drafter's (or -1), ``n`` tokens stand: all that is stored of them moves up to where it belongs.
    void settle(int b, int at, int i, int n) {
        Going& row = it->going[b];
        const int64_t* drafted = drafted_of(b);
        const int32_t* path = path_of(b);
        char* states = read();
        for (int t = 0; t < n; t++) {
            row.text[row.length + t] = drafted[path[t]];
            const int32_t* table = scored.batch.tables + scored.all_tables[b];
            move_stored(scored.batch, target->shape, table, row.length + path[t], row.length + t);
            if (states && path[t] != t)
                memcpy(states + (at + 1 + t) * state_bytes, states + (at + 1 + path[t]) * state_bytes, state_bytes);
        }
        // A head's own features do not stay.
        if (i >= 0 && !heads) row.draft_start += forest->keep(i, draft.batch, path, n, row.length);
    }

    // A NaN leaves it open what follows row ``b``.
    int leave_open(int b) {
        it->following[place(b)] = NO_NUMBER;
        return 0;
    }

    // How many drafted tokens of row ``b`` stand (less than 0: the row is at its end), by its ``logits`` and its ``own``
    // most likely tokens, and what follows them. ``distributions`` is what they were drawn from, or null.
    int verify(int b, const float* logits, const int32_t* own, const float* distributions) {
        for (int n = 0; n <= drafts[b]; n++)
            if (own[n] < 0) return leave_open(b);
        if (forest) return walk(b, logits, own);
        const Variant* judge = variants[it->variant];
        const Going& row = it->going[b];
        const int64_t* drafted = drafted_of(b);
        const bool draws = it->sampling && it->sampling[b].temperature > 0;
        int n = 0;
        if (draws) {
            uniforms(row.seed, row.length, ACCEPT, drafts[b], coins);
            n = judge->accepts(logits, vocab, it->sampling + b, drafted, drafts[b], distributions, coins, false, it->spread,
                               nullptr);
            if (n < 0) return leave_open(b);
        } else {
            while (n < drafts[b] && drafted[n] == own[n]) n++;
        }
        if (n < drafts[b] && it->decide) {
            *it->stands = UNANSWERED;
            it->decide(it->rounds);
            return *it->stands;
        }
        if (draws) {
            const long at = (long)n * vocab;
            uniforms(row.seed, row.length, SAMPLE, 1, coins);
            it->following[place(b)] = judge->follow(logits + at, vocab, it->sampling + b, n < drafts[b] ? drafted[n] : -1,
                                                    distributions ? distributions + at : nullptr, coins[0], it->spread);
            return n;
        }
        if (n < drafts[b] && row.clauses) n = excuse(b, logits, drafted, own, n);
        it->following[place(b)] = own[n];
        return n;
    }
};

}  // namespace

// Rounds of the rows of ``batch``, which the target has stored but for their last tokens: draft, verify, emit, again and
// again, until a row emits a stop id or all that is left of it, its room may not do, a NaN leaves it open what follows it,
// or the time is over. Without a ``drafter`` a ``lookup`` drafts what followed the last time, with neither nobody does.
// What stands of a tree is stored in order at the end of each round, with the hidden states of it.
EXPORT int fly_rounds(Model* target, const Batch* batch, Model* drafter, const Batch* draft_batch, Lookup* lookup,
                      Rounds* it) {
    const int64_t begin = nanoseconds();
    const int rows = batch->rows;
    long late = 0;
    for (int b = 0; drafter && b < rows; b++) late += it->going[b].length - it->going[b].draft_start + it->k + 1;
    long longest = 0, seen = 0;
    for (int b = 0; b < rows; b++) {
        const long room = it->going[b].room;
        longest = room > longest ? room : longest, seen += room;
    }
    Forest forest(it->growth, drafter ? drafter : target, variants[it->variant], rows, longest, late);
    Play play(it, target, batch, drafter, draft_batch, lookup, late, it->growth ? &forest : nullptr, seen * (it->k + 1));
    if (!forest.has_memory() || !play.arena.base) return NO_MEMORY;
    it->rounds = it->asks = it->read_before = 0;
    for (int i = 0; i < 2; i++) it->elapsed[i] = it->scoring[i] = it->drafting[i] = 0;
    for (int64_t now = begin;;) {
        const int64_t from = now;
        const bool later = it->rounds > 0;
        const auto lap = [&] {
            const int64_t since = now;
            return (now = nanoseconds()) - since;
        };
        play.plan();
        const int asked = play.draft.batch.rows;
        if (asked)
            if (const int error = play.propose()) return error;
        const int64_t proposing = lap();
        if (asked || lookup) it->drafting[later] += proposing;
        if (const int error = play.score()) return error;
        it->scoring[later] += lap();
        bool over = it->rounds + 1 == it->most;
        for (int b = 0, at = 0, i = 0; b < rows; at += play.drafts[b] + 1, b++) {
            const Going& row = it->going[b];
            const long place = play.place(b);
            const bool drafted = i < asked && play.draft.row[i] == b;
            const float* distributions = drafted ? it->distributions : nullptr;
            if (distributions) distributions += (long)i * play.longest * play.vocab;
            const int tree = drafted ? i : -1;
            i += drafted;
            it->drafted_count[place] = play.drafts[b];
            memcpy(it->choice + place * (it->k + 1), play.choice + at, (play.drafts[b] + 1) * sizeof(int32_t));
            if (play.heads) play.states[b] = play.read() + at * play.state_bytes;
            const float* logits = it->logits + (long)at * play.vocab;
            const int n = it->accepted[place] = play.verify(b, logits, play.choice + at, distributions);
            if (it->growth) play.settle(b, at, tree, n);
            if (n >= 0) row.text[row.length + n] = it->following[place];
            for (int t = row.length; t <= row.length + n; t++) over |= play.ends(b, row.text[t]);
            const int next = it->growth ? it->spare : least_of(row.k, row.left - n - 2);  // it drafts so many, at most
            over |= n < 0 || it->following[place] < 0 || n + 1 >= row.left || row.length + n + 1 + next > row.room;
        }
        it->rounds++;
        lap();
        it->elapsed[later] += now - from;
        over |= now - begin >= it->nanoseconds;
        over |= it->clause && it->asks + play.new_tokens > it->most_asks;
        over |= it->hurry && __atomic_load_n(it->hurry, __ATOMIC_RELAXED);
        if (over) return OK;
        it->read_before += play.scored.batch.tokens;
        for (int b = 0; b < rows; b++) {
            Going& row = it->going[b];
            const int before = row.length, n = it->accepted[(long)b * it->most + it->rounds - 1];
            row.length += n + 1, row.left -= n + 1;
            row.draft_start = least_of(row.draft_start, before + n);
            for (int t = before; row.copied && t < row.length; t++) row.copied[t] = (int32_t)row.text[t];
        }
    }
}
