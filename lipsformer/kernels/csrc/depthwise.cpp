// Depthwise convolution of channels-last maps [B, H, W, C] with kernels [C, K, K], zero padded to
// the size of the map: value, also with GELU and the residual around it, gradient of the input
// (flipped kernels, no bias), gradients of kernels and bias.
//
// A task takes LANES channels of an image. Rows run along the longer side of the map (kernels are
// transposed for that) and are copied one after the other into a ring of K rows, which stays in the
// first cache; up to 14 neighboring outputs, held in registers, share what is loaded.
#include "export.h"
#include "parallel.h"

#include <algorithm>
#include <type_traits>

namespace {

constexpr int WIDE = 14, NARROW = 7;  // neighbors at a time: maps of 56, 28, 14 and 7 divide

// Maps with their rows along the longer side; strides in floats.
struct Maps {
    Maps(int64_t batch, int64_t height, int64_t width, int64_t channels)
        : transposed(height > width), rows(std::min(height, width)),
          columns(std::max(height, width)), row_stride(transposed ? channels : width * channels),
          column_stride(transposed ? width * channels : channels), batch(batch),
          channels(channels), blocks((channels + LANES - 1) / LANES),
          padded((columns + NARROW - 1) / NARROW * NARROW) {}

    bool transposed;
    int64_t rows, columns, row_stride, column_stride, batch, channels, blocks, padded;

    int64_t start(int64_t image, int64_t block) const {
        return image * rows * columns * channels + block * LANES;
    }
    int64_t lanes(int64_t block) const { return std::min(LANES, channels - block * LANES); }
};

// Ask for lines of a row that will be read, or written, some hundred nanoseconds later.
template <int WRITE, class Value> void prefetch(const Value *at, int64_t stride, int count) {
    for (int i = 0; i < count; ++i) __builtin_prefetch(at + i * stride, WRITE, WRITE ? 3 : 2);
}

// Place of a tap in a kernel [K, K].
template <int K> int64_t tap(int64_t row, int64_t column, bool transposed, bool flip) {
    int64_t place = transposed ? column * K + row : row * K + column;
    return flip ? K * K - 1 - place : place;
}

// Call f(x, size, left, right) for runs of `size` columns from x on; left and right say, at compile
// time, whether the run begins or ends the row. The last one may reach into the padding.
template <class F> void runs(int64_t columns, F f) {
    using Wide = std::integral_constant<int, WIDE>;
    using Narrow = std::integral_constant<int, NARROW>;
    std::true_type yes;
    std::false_type no;
    if (columns <= NARROW) return f(0, Narrow(), yes, yes);
    if (columns <= WIDE) return f(0, Wide(), yes, yes);
    f(0, Wide(), yes, no);
    int64_t x = WIDE;
    for (; columns - x > WIDE; x += WIDE) f(x, Wide(), no, no);
    columns - x > NARROW ? f(x, Wide(), no, yes) : f(x, Narrow(), no, yes);
}

// The last K rows of a map, LANES channels, one after the other without gaps.
template <int K> struct Ring {
    Ring(const Maps &maps)
        : maps(maps), scratch(K * maps.padded * LANES),
          ring(scratch.take(K * maps.padded * LANES)) {}

    // Rows up to the given one, from 0 on.
    template <class Value> void fill(const Value *map, int64_t row, int64_t lanes) {
        for (; next <= std::min(row, maps.rows - 1); ++next) {
            const Value *from = map + next * maps.row_stride;
            float *to = ring + next % K * maps.padded * LANES;
            if (lanes == LANES)
                for (int64_t x = 0; x < maps.columns; ++x)
                    store(to + x * LANES, load(from + x * maps.column_stride));
            else
                for (int64_t x = 0; x < maps.columns; ++x)
                    store(to + x * LANES, load_first(from + x * maps.column_stride, lanes));
        }
    }
    // The row that is read after the given one: of this map, then of the following.
    template <class Value>
    const Value *after(const Value *map, const Value *following, int64_t row) const {
        ++row;
        return row < maps.rows ? map + row * maps.row_stride
                               : following + (row - maps.rows) * maps.row_stride;
    }
    const float *row(int64_t row) const { return ring + row % K * maps.padded * LANES; }

    const Maps &maps;
    Scratch scratch;
    float *ring;
    int64_t next = 0;
};

// What follows the convolution z: nothing, GELU(z), or x + scale * GELU(z) where a scale is given.
struct Ending {
    bool gelu = false;
    const float *scale = nullptr;  // [C] or null
};

template <int K, class Value>
void convolve(const Value *x, const float *weight, const float *bias, Value *y, const Maps &maps,
              bool flip, Ending ending, int64_t threads) {
    constexpr int P = K / 2;
    Scratch scratch(maps.blocks * K * K * LANES);
    float *taps = scratch.take(maps.blocks * K * K * LANES);
    parallel(threads, [=, &maps](const Team &team) {
        Ring<K> ring(maps);
        team.share(maps.channels, [&](int64_t c) {
            for (int row = 0; row < K; ++row)
                for (int column = 0; column < K; ++column)
                    taps[(c / LANES * K * K + row * K + column) * LANES + c % LANES] =
                        weight[c * K * K + tap<K>(row, column, maps.transposed, flip)];
        });
        GOMP_barrier();
        team.share(maps.batch * maps.blocks, [&](int64_t task) {
            const int64_t block = task % maps.blocks, lanes = maps.lanes(block);
            const int64_t start = maps.start(task / maps.blocks, block);
            const int64_t next = task + 1;
            const int64_t following = maps.start(next / maps.blocks, next % maps.blocks);
            const float *kernel = taps + block * K * K * LANES;
            const vec initial = bias ? load_first(bias + block * LANES, lanes) : vec{};
            const vec scale =
                ending.scale ? load_first(ending.scale + block * LANES, lanes) : vec{};
            ring.next = 0;
            for (int64_t row = 0; row < maps.rows; ++row) {
                ring.fill(x + start, row + P, lanes);
                const int64_t first = std::max<int64_t>(0, P - row);
                const int64_t last = std::min<int64_t>(K, maps.rows + P - row);
                Value *out = y + start + row * maps.row_stride;
                const Value *ahead = ring.after(x + start, x + following, row + P);
                runs(maps.columns, [&](int64_t begin, auto size, auto left, auto right) {
                    constexpr int T = size, FROM = left ? 0 : -P, TO = right ? T : T + P;
                    vec sums[T];
#pragma GCC unroll 16
                    for (int t = 0; t < T; ++t) sums[t] = initial;
                    Value *to = out + begin * maps.column_stride;
                    prefetch<1>(to, maps.column_stride, T);
                    prefetch<0>(ahead + begin * maps.column_stride, maps.column_stride, T);
                    for (int64_t k = first; k < last; ++k) {
                        const float *in = ring.row(row + k - P) + begin * LANES;
                        vec w[K];
#pragma GCC unroll 8
                        for (int i = 0; i < K; ++i) w[i] = load(kernel + (k * K + i) * LANES);
#pragma GCC unroll 32
                        for (int i = FROM; i < TO; ++i) {
                            vec value = load(in + i * LANES);
#pragma GCC unroll 8
                            for (int j = 0; j < K; ++j)
                                if (i + P - j >= 0 && i + P - j < T)
                                    sums[i + P - j] += value * w[j];
                        }
                    }
                    const int64_t count = right ? maps.columns - begin : T;
                    alignas(64) float activated[T * LANES];
                    if (ending.gelu) {
#pragma GCC unroll 16
                        for (int t = 0; t < T; ++t) store(activated + t * LANES, sums[t]);
                        const float *input = ring.row(row) + begin * LANES;
                        for (int t = 0; t < T; ++t) {
                            vec value = gelu(load(activated + t * LANES));
                            if (ending.scale) value = load(input + t * LANES) + scale * value;
                            store(activated + t * LANES, value);
                        }
#pragma GCC unroll 16
                        for (int t = 0; t < T; ++t) sums[t] = load(activated + t * LANES);
                    }
#pragma GCC unroll 16
                    for (int t = 0; t < T; ++t, to += maps.column_stride)
                        if (t < count)
                            lanes == LANES ? store(to, sums[t]) : store_first(to, sums[t], lanes);
                });
            }
        });
    });
}

template <int K, class Value>
void parameter_gradients(const Value *x, const Value *grad, float *grad_weight, float *grad_bias,
                      const Maps &maps, int64_t threads) {
    constexpr int P = K / 2, SIZE = (K * K + 1) * LANES;
    // Sums within an image, then within a group of images, then of the groups: these are as many as
    // make 32 tasks, at most 8, whatever the number of threads.
    int64_t groups = 1;
    while (groups * maps.blocks < 32 && groups < 8 && 2 * groups <= maps.batch) groups *= 2;
    Scratch scratch(groups * maps.blocks * SIZE);
    float *parts = scratch.take(groups * maps.blocks * SIZE);
    parallel(threads, [=, &maps](const Team &team) {
        Ring<K> ring(maps);
        Scratch of_thread(maps.padded * LANES);
        float *upstream = of_thread.take(maps.padded * LANES);
        team.share(groups * maps.blocks, [&](int64_t task) {
            const int64_t group = task / maps.blocks, block = task % maps.blocks;
            const int64_t lanes = maps.lanes(block);
            float *part = parts + task * SIZE;
            for (int64_t image = group; image < maps.batch; image += groups) {
                const int64_t start = maps.start(image, block);
                const int64_t following = maps.start(image + groups, block);
                alignas(64) float sums[SIZE] = {};
                ring.next = 0;
                for (int64_t row = 0; row < maps.rows; ++row) {
                    ring.fill(x + start, row + P, lanes);
                    const int64_t first = std::max<int64_t>(0, P - row);
                    const int64_t last = std::min<int64_t>(K, maps.rows + P - row);
                    const Value *from = grad + start + row * maps.row_stride;
                    const Value *ahead = ring.after(x + start, x + following, row + P);
                    const Value *grad_ahead = ring.after(grad + start, grad + following, row);
                    vec total = load(sums + K * K * LANES);
                    for (int64_t i = 0; i < maps.columns; ++i, from += maps.column_stride) {
                        vec value = lanes == LANES ? load(from) : load_first(from, lanes);
                        store(upstream + i * LANES, value);
                        total += value;
                    }
                    store(sums + K * K * LANES, total);
                    runs(maps.columns, [&](int64_t begin, auto size, auto left, auto right) {
                        constexpr int T = size, FROM = left ? 0 : -P, TO = right ? T : T + P;
                        vec g[T];
                        const int64_t stride = maps.column_stride;
                        prefetch<0>(ahead + begin * stride, stride, T);
                        prefetch<0>(grad_ahead + begin * stride, stride, T);
#pragma GCC unroll 16
                        for (int t = 0; t < T; ++t)
                            g[t] = load(upstream + (begin + t) * LANES);
                        for (int64_t k = first; k < last; ++k) {
                            const float *in = ring.row(row + k - P) + begin * LANES;
                            float *tap_sums = sums + k * K * LANES;
                            vec w[K];
#pragma GCC unroll 8
                            for (int i = 0; i < K; ++i) w[i] = load(tap_sums + i * LANES);
#pragma GCC unroll 32
                            for (int i = FROM; i < TO; ++i) {
                                vec value = load(in + i * LANES);
#pragma GCC unroll 8
                                for (int j = 0; j < K; ++j)
                                    if (i + P - j >= 0 && i + P - j < T)
                                        w[j] += value * g[i + P - j];
                            }
#pragma GCC unroll 8
                            for (int i = 0; i < K; ++i) store(tap_sums + i * LANES, w[i]);
                        }
                    });
                }
                for (int64_t i = 0; i < SIZE; ++i) part[i] += sums[i];
            }
        });
        GOMP_barrier();
        team.share(maps.channels, [&](int64_t c) {
            for (int64_t i = 0; i <= K * K; ++i) {
                float total = 0.0f;
                for (int64_t group = 0; group < groups; ++group)
                    total += parts[(group * maps.blocks + c / LANES) * SIZE + i * LANES +
                                        c % LANES];
                if (i == K * K)
                    grad_bias[c] = total;
                else
                    grad_weight[c * K * K + tap<K>(i / K, i % K, maps.transposed, false)] = total;
            }
        });
    });
}

template <class Value>
void depthwise(const Value *x, const float *weight, const float *bias, Value *y, int64_t batch,
               int64_t height, int64_t width, int64_t channels, int64_t kernel, int64_t flip,
               int64_t threads) {
    const Maps maps(batch, height, width, channels);
    const auto convolution = kernel == 3 ? convolve<3, Value> : convolve<7, Value>;
    convolution(x, weight, bias, y, maps, flip, Ending(), threads);
}

template <class Value>
void depthwise_gelu(const Value *x, const float *weight, const float *bias, const float *scale,
                    Value *y, int64_t batch, int64_t height, int64_t width, int64_t channels,
                    int64_t kernel, int64_t threads) {
    const Maps maps(batch, height, width, channels);
    const auto convolution = kernel == 3 ? convolve<3, Value> : convolve<7, Value>;
    convolution(x, weight, bias, y, maps, false, Ending{true, scale}, threads);
}

template <class Value>
void depthwise_parameters(const Value *x, const Value *grad, float *grad_weight, float *grad_bias,
                          int64_t batch, int64_t height, int64_t width, int64_t channels,
                          int64_t kernel, int64_t threads) {
    const Maps maps(batch, height, width, channels);
    const auto sums = kernel == 3 ? parameter_gradients<3, Value> : parameter_gradients<7, Value>;
    sums(x, grad, grad_weight, grad_bias, maps, threads);
}

}  // namespace

EXPORT(depthwise)
EXPORT(depthwise_gelu)
EXPORT(depthwise_parameters)
