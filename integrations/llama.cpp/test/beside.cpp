// A program that is linked with hoistway's library, and statically with what a patched llama.cpp has of hoistway: opens a model's
// catalog by the library.
#include "hoistway.hpp"

#include <cstdio>
#include <exception>

int main(int count, char ** arguments) try {
    const hoistway::Catalog catalog({ count > 1 ? arguments[1] : "" });
    size_t tensors = 0;
    for (const hoistway_tensor & tensor : catalog) {
        tensors += tensor.name != nullptr;
    }
    std::printf("{\"tensors\": %zu}\n", tensors);
    return 0;
} catch (const std::exception & error) {
    std::fprintf(stderr, "beside: %s\n", error.what());
    return 1;
}
