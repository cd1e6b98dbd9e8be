// y = a b + bias in float32, and GELU of a or of y if asked.
//
// A tile of 6 x 16 sums stays in registers, with AVX-512 one of 14 x 32, which divides windows of 49
// tokens well. The columns of b that it needs lie side by side, as a panel. Of a block of rows of a,
// a part of the inputs is copied and multiplied by all panels before the next part. So the copy and a
// panel's part stay in the first two caches. While the first tile of a panel is computed, the next
// panel's part is fetched into the second cache.
#include "rows.h"

namespace {

constexpr int64_t ROWS = LANES == 16 ? 14 : 6;
constexpr int64_t COLUMNS = LANES == 16 ? 32 : 16, VECS = COLUMNS / LANES;
constexpr int64_t BLOCK_ROWS = LANES == 16 ? 98 : 96, DEPTH = 384;
constexpr int64_t STRIDE = DEPTH + 16;  // of the copied rows: no power of 2, where lines collide
constexpr int64_t LINE = 16, AHEAD = 16;  // floats of a cache line; inputs that are fetched ahead

// How b lies in memory.
enum Layout : int64_t {
    PLAIN,       // [inputs, outputs]
    TRANSPOSED,  // [outputs, inputs]
    PANELS,      // [panels, inputs, COLUMNS], zeros behind the last output
};

// What GELU is applied to.
enum Act : int64_t { NOTHING, OUTPUT, INPUT };

struct Product {
    const float *a;     // [rows, inputs], or its transpose
    const float *b;     // as layout says
    const float *bias;  // [outputs], or null
    float *y;           // [rows, outputs]
    int64_t rows, inputs, outputs;
    bool a_transposed;
    Layout layout;
    Act act;
    int64_t sum_begin = 0, sum_end = inputs;  // the inputs that are summed

    int64_t panels() const { return (outputs + COLUMNS - 1) / COLUMNS; }

    // One panel of b, its inputs from begin to end - 1.
    void pack(int64_t panel, int64_t begin, int64_t end, float *packed) const {
        const int64_t column = panel * COLUMNS, columns = std::min(COLUMNS, outputs - column);
        if (columns < COLUMNS) std::fill_n(packed, (end - begin) * COLUMNS, 0.0f);
        if (layout == TRANSPOSED)
            return transpose(b + column * inputs + begin, inputs, columns, end - begin, packed, COLUMNS);
        for (int64_t k = begin; k < end; ++k, packed += COLUMNS) {
            const float *row = b + k * outputs + column;
            for (int64_t i = 0; i < COLUMNS; i += LINE) __builtin_prefetch(row + AHEAD * outputs + i);
            if (columns == COLUMNS)
                std::copy_n(row, COLUMNS, packed);  // of a constant length: a few vectors
            else
                std::copy_n(row, columns, packed);
        }
    }

    // n rows of a, or of GELU(a), the inputs from begin to end - 1.
    void copy_rows(int64_t row, int64_t n, int64_t begin, int64_t end, float *copy) const {
        if (a_transposed) return copy_tiles(a + begin * rows + row, n, end - begin, copy);
        for (int64_t i = 0; i < n; ++i, copy += STRIDE) {
            const float *from = a + (row + i) * inputs + begin;
            if (act == INPUT)
                each(end - begin, [=](int64_t k, auto lanes) {
                    lanes.store(copy + k, gelu(lanes.load(from + k)));
                });
            else
                std::copy_n(from, end - begin, copy);
        }
    }

    // n rows of the transposed a and some of its inputs. Those of a tile lie side by side.
    void copy_tiles(const float *input, int64_t n, int64_t count, float *copy) const {
        for (int64_t k = 0; k < count; ++k, input += rows, copy += ROWS) {
            for (int64_t i = 0; i < n; i += LINE) __builtin_prefetch(input + AHEAD * rows + i);
            int64_t i = 0;
            for (; i + ROWS <= n; i += ROWS) std::copy_n(input + i, ROWS, copy + i * STRIDE);
            std::copy_n(input + i, n - i, copy + i * STRIDE);
        }
    }

    // The product of the rows and the panels from the first to the last but one.
    void compute(int64_t row, int64_t last_row, int64_t panel, int64_t last_panel) const {
        // Together too large for the stack of a small thread.
        static thread_local float copy[BLOCK_ROWS * STRIDE], packed[DEPTH * COLUMNS];
        const int64_t length = sum_end - sum_begin, parts = (length + DEPTH - 1) / DEPTH;
        for (; row < last_row; row += BLOCK_ROWS) {
            const int64_t n = std::min(BLOCK_ROWS, last_row - row);
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t begin = sum_begin + length * part / parts;
                const int64_t end = sum_begin + length * (part + 1) / parts;
                copy_rows(row, n, begin, end, copy);
                for (int64_t p = panel; p < last_panel; ++p) {
                    if (layout != PANELS) pack(p, begin, end, packed);
                    const float *w = layout == PANELS ? b + (p * inputs + begin) * COLUMNS : packed;
                    const bool more = layout == PANELS && p + 1 < last_panel;
                    const float *next = more ? w + inputs * COLUMNS : w;
                    if (a_transposed)
                        tiles<true>(n, copy, w, next, row, p, begin, end);
                    else
                        tiles<false>(n, copy, w, next, row, p, begin, end);
                }
            }
        }
    }

    // n rows and one panel.
    template <bool TRANSPOSED_A>
    void tiles(int64_t n, const float *copy, const float *w, const float *next, int64_t row,
               int64_t panel, int64_t begin, int64_t end) const {
        for (; n >= ROWS; n -= ROWS, copy += ROWS * STRIDE, row += ROWS, next = w)
            tile<TRANSPOSED_A, ROWS>(copy, w, next, row, panel, begin, end);
        rest<TRANSPOSED_A, ROWS - 1>(n, copy, w, row, panel, begin, end);
    }

    // n rows, at most R.
    template <bool TRANSPOSED_A, int64_t R>
    void rest(int64_t n, const float *copy, const float *w, int64_t row, int64_t panel,
              int64_t begin, int64_t end) const {
        if (n == R)
            tile<TRANSPOSED_A, R>(copy, w, w, row, panel, begin, end);
        else if constexpr (R > 1)
            rest<TRANSPOSED_A, R - 1>(n, copy, w, row, panel, begin, end);
    }

    // R rows, one panel, and the inputs from begin to end - 1. The panel at next is fetched.
    template <bool TRANSPOSED_A, int64_t R>
    __attribute__((noinline)) void tile(const float *copy, const float *w, const float *next,
                                        int64_t row, int64_t panel, int64_t begin,
                                        int64_t end) const {
        // finish takes them by reference, and clang forgets there that a vec may lie anywhere.
        alignas(LANES * sizeof(float)) vec sums[R][VECS] = {};
#pragma GCC unroll 8
        for (int64_t k = 0; k < end - begin; ++k, w += COLUMNS, next += COLUMNS) {
            for (int64_t v = 0; v < VECS; ++v) __builtin_prefetch(next + v * LANES, 0, 2);
            vec weights[VECS];
            for (int64_t v = 0; v < VECS; ++v) weights[v] = load(w + v * LANES);
            each_vector<R, VECS>([&](int64_t r, int64_t v) {
                sums[r][v] += splat(copy[TRANSPOSED_A ? k * ROWS + r : r * STRIDE + k]) * weights[v];
            });
        }
        const bool first = begin == sum_begin, last = end == inputs;
        const int64_t column = panel * COLUMNS, columns = std::min(COLUMNS, outputs - column);
        const float *offset = bias == nullptr ? nullptr : bias + column;
        float *to = y + row * outputs + column;
        if (columns == COLUMNS) return finish(sums, first, last, offset, to, outputs);
        float whole[R * COLUMNS] = {}, whole_offset[COLUMNS] = {};
        for (int64_t r = 0; r < R && !first; ++r)
            std::copy_n(to + r * outputs, columns, whole + r * COLUMNS);
        if (offset != nullptr) std::copy_n(offset, columns, whole_offset);
        finish(sums, first, last, whole_offset, whole, COLUMNS);
        for (int64_t r = 0; r < R; ++r) std::copy_n(whole + r * COLUMNS, columns, to + r * outputs);
    }

    // Add the bias to the sums of the first part, and what lies in y to those of the others.
    template <int64_t R>
    void finish(vec (&sums)[R][VECS], bool first, bool last, const float *offset, float *to,
                int64_t stride) const {
        if (!first)
            each_vector<R, VECS>([&](int64_t r, int64_t v) {
                sums[r][v] += load(to + r * stride + v * LANES);
            });
        else if (offset != nullptr)
            each_vector<R, VECS>([&](int64_t r, int64_t v) { sums[r][v] += load(offset + v * LANES); });
        if (last && act == OUTPUT) return store_gelu(sums, to, stride);
        each_vector<R, VECS>([&](int64_t r, int64_t v) {
            store(to + r * stride + v * LANES, sums[r][v]);
        });
    }

    // A loop over memory: unrolled for registers, GELU would be written out for each of them.
    template <int64_t R>
    static void store_gelu(const vec (&sums)[R][VECS], float *to, int64_t stride) {
        float all[R * COLUMNS];
        each_vector<R, VECS>([&](int64_t r, int64_t v) {
            store(all + r * COLUMNS + v * LANES, sums[r][v]);
        });
        for (int64_t r = 0; r < R; ++r)
            for (int64_t v = 0; v < VECS; ++v)
                store(to + r * stride + v * LANES, gelu(load(all + r * COLUMNS + v * LANES)));
    }

    void run(int64_t threads) const {
        const int64_t tiles = (rows + ROWS - 1) / ROWS, count = panels();
        // A thread has a share of the rows or of the panels, whichever are more.
        parallel(threads, [=, product = *this](const Team &team) {
            if (tiles > count)
                product.compute(team.begin(tiles) * ROWS,
                                std::min(team.end(tiles) * ROWS, product.rows), 0, count);
            else
                product.compute(0, product.rows, team.begin(count), team.end(count));
        });
    }

    // A thread has a share of the inputs. Then the threads add their sums to those of the first. A
    // bias would be added by each.
    void run_shares_of_inputs(int64_t threads) const {
        const int64_t n = rows * outputs;
        std::unique_ptr<float[]> memory(new float[(threads - 1) * n]);
        float *const sums = memory.get();
        parallel(threads, [=, product = *this](const Team &team) {
            Product share = product;
            share.sum_begin = team.begin(product.inputs), share.sum_end = team.end(product.inputs);
            if (team.thread > 0) share.y = sums + (team.thread - 1) * n;
            share.compute(0, share.rows, 0, share.panels());
            GOMP_barrier();
            for (int64_t other = 0; other < team.threads - 1; ++other)
                for (int64_t i = team.begin(n), end = team.end(n); i < end; ++i)
                    product.y[i] += sums[other * n + i];
        });
    }
};

void product(const float *a, const float *b, const float *bias, float *y, int64_t rows,
             int64_t inputs, int64_t outputs, int64_t a_transposed, int64_t layout, int64_t act,
             int64_t threads) {
    Product p{a, b, bias, y, rows, inputs, outputs, a_transposed != 0, Layout(layout), Act(act)};
    if (rows * inputs * outputs < COLUMNS * ALONE) threads = 1;
    std::unique_ptr<float[]> packed;
    // A panel is packed where it is needed if that is once or twice.
    if (layout != PANELS && rows > 2 * BLOCK_ROWS) {
        packed.reset(new float[p.panels() * inputs * COLUMNS]);
        float *const to = packed.get();
        parallel_for(threads, p.panels(), [=](int64_t panel) {
            p.pack(panel, 0, inputs, to + panel * inputs * COLUMNS);
        });
        p.b = to;
        p.layout = PANELS;
    }
    // Long sums of few numbers: the threads would copy the same inputs.
    if (threads > 1 && a_transposed && inputs > threads * (rows + outputs))
        return p.run_shares_of_inputs(threads);
    p.run(threads);
}

}  // namespace

EXPORT_FLOAT32(product)
