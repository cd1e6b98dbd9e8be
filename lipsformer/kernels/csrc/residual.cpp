// x + scale * z and x + scale * GELU(z), and their gradients, each in one pass over the map.
#include "rows.h"

namespace {

struct Identity {
    static vec value(vec z) { return z; }
};

struct Gelu {
    static vec value(vec z) { return gelu(z); }
};

// y = x + scale * act(z), where z has only the samples `kept` if they are given. The scale is one
// row (stride 0) or one per sample of z.
template <class Value, class Act = Identity>
void residual(const Value *x, const Value *z, const float *scale, int64_t scale_stride,
              const int64_t *kept, Value *y, int64_t samples, int64_t num_kept, int64_t tokens,
              int64_t channels, int64_t threads) {
    std::vector<int64_t> slots(samples, -1);  // where in z a sample is
    const int64_t *const slot_of = slots.data();
    for (int64_t k = 0; k < num_kept; ++k) slots[kept == nullptr ? k : kept[k]] = k;
    if (samples * tokens * channels < ALONE) threads = 1;
    parallel_for(threads, samples * tokens, [=](int64_t row) {
        const int64_t slot = slot_of[row / tokens];
        const Value *from = x + row * channels;
        Value *to = y + row * channels;
        if (slot < 0) {
            std::copy(from, from + channels, to);
            return;
        }
        const Value *branch = z + (slot * tokens + row % tokens) * channels;
        const float *factor = scale + slot * scale_stride;
        each(channels, [=](int64_t i, auto lanes) {
            const vec added = lanes.load(factor + i) * Act::value(lanes.load(branch + i));
            lanes.store(to + i, lanes.load(from + i) + added);
        });
    });
}

template <class Value>
constexpr auto gelu_residual = residual<Value, Gelu>;

// grad_z = grad * scale, for the samples `kept` alone if they are given.
template <class Value>
void residual_gradient(const Value *grad, const float *scale, int64_t scale_stride,
                       const int64_t *kept, Value *grad_z, int64_t num_kept, int64_t tokens,
                       int64_t channels, int64_t threads) {
    if (num_kept * tokens * channels < ALONE) threads = 1;
    parallel_for(threads, num_kept * tokens, [=](int64_t row) {
        const int64_t k = row / tokens, sample = kept == nullptr ? k : kept[k];
        const Value *from = grad + (sample * tokens + row % tokens) * channels;
        const float *factor = scale + k * scale_stride;
        Value *to = grad_z + row * channels;
        each(channels, [=](int64_t i, auto lanes) {
            lanes.store(to + i, lanes.load(from + i) * lanes.load(factor + i));
        });
    });
}

// grad_z = grad * scale * GELU'(z); grad_scale, of the scale's shape, sums grad * GELU(z).
template <class Value>
void gelu_residual_gradients(const Value *grad, const Value *z, const float *scale,
                             int64_t scale_stride, const int64_t *kept, Value *grad_z,
                             float *grad_scale, int64_t num_kept, int64_t tokens, int64_t channels,
                             int64_t threads) {
    const Parts parts(tokens);
    std::vector<float> sums(num_kept * parts.count * channels);
    float *const totals = sums.data();
    if (num_kept * tokens * channels < ALONE) threads = 1;
    parallel_for(threads, num_kept * parts.count, [=](int64_t unit) {
        const int64_t k = unit / parts.count, part = unit % parts.count;
        const int64_t sample = kept == nullptr ? k : kept[k];
        const float *factor = scale + k * scale_stride;
        float *total = totals + unit * channels;
        for (int64_t token = parts.begin(part); token < parts.begin(part + 1); ++token) {
            const Value *from = grad + (sample * tokens + token) * channels;
            const Value *branch = z + (k * tokens + token) * channels;
            Value *to = grad_z + (k * tokens + token) * channels;
            each(channels, [=](int64_t i, auto lanes) {
                const vec g = lanes.load(from + i), x = lanes.load(branch + i);
                vec value, density;
                normal(x, value, density);
                lanes.store(to + i, g * lanes.load(factor + i) * (value + x * density));
                lanes.store(total + i, lanes.load(total + i) + g * (x * value));
            });
        }
    });
    std::fill(grad_scale, grad_scale + (scale_stride == 0 ? 1 : num_kept) * channels, 0.0f);
    for (int64_t k = 0; k < num_kept; ++k)
        add_parts(sums.data() + k * parts.count * channels, parts.count, channels,
                  grad_scale + k * scale_stride);
}

}  // namespace

EXPORT(residual)
EXPORT(residual_gradient)
EXPORT(gelu_residual)
EXPORT(gelu_residual_gradients)
