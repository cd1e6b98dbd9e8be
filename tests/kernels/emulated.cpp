// driver LIBRARY KERNEL MEMORY ARGUMENT...
//
// Call the function to which a pointer in a shared library points. An argument is an integer, "f" and
// a float, or "@" and an offset into the bytes of the file MEMORY, which the call may change and which
// are written back.
//
// Integers and pointers on the one hand and floats on the other have registers of their own, in
// order, and further integers follow on the stack. So the floats may come first here, and integers
// that the function does not have do no harm.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

constexpr size_t INTEGERS = 24, FLOATS = 2;

template <size_t... I>
void call(void *function, const float *x, const int64_t *n, std::index_sequence<I...>) {
    reinterpret_cast<void (*)(float, float, decltype(int64_t(I))...)>(function)(x[0], x[1], n[I]...);
}

int main(int count, char **words) {
    void *library = dlopen(words[1], RTLD_NOW);
    void **function = library ? static_cast<void **>(dlsym(library, words[2])) : nullptr;
    if (function == nullptr) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    std::ifstream file(words[3], std::ios::binary);
    std::vector<char> memory{std::istreambuf_iterator<char>(file), {}};
    std::vector<int64_t> integers;
    std::vector<float> floats;
    for (int i = 4; i < count; ++i) {
        const std::string word = words[i];
        if (word[0] == 'f')
            floats.push_back(strtof(word.c_str() + 1, nullptr));
        else if (word[0] == '@')
            integers.push_back(reinterpret_cast<int64_t>(memory.data() + std::stoll(word.substr(1))));
        else
            integers.push_back(std::stoll(word));
    }
    if (integers.size() > INTEGERS || floats.size() > FLOATS) {
        fprintf(stderr, "too many arguments\n");
        return 1;
    }
    integers.resize(INTEGERS);
    floats.resize(FLOATS);
    call(*function, floats.data(), integers.data(), std::make_index_sequence<INTEGERS>());
    std::ofstream(words[3], std::ios::binary).write(memory.data(), memory.size());
}
