// What the C++ header promises. Usage: conformance FILE: a checkpoint of at least three tensors.
#include "../include/hoistway.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

static void check(bool condition, const char* what) {
    if (!condition) {
        std::fprintf(stderr, "not so: %s\n", what);
        std::exit(1);
    }
}

int main(int, char** arguments) {
    hoistway::Catalog catalog({arguments[1]});
    check(catalog.size() >= 3, "there are tensors");
    std::vector<std::vector<char>> memory;
    std::vector<hoistway::Read> reads;
    for (const hoistway_tensor& tensor : catalog) {
        check(catalog.find(tensor.name).value().offset == tensor.offset, "tensors are found by name");
        memory.emplace_back(tensor.bytes);
        reads.push_back(catalog.to_host(tensor, memory.back().data()));
    }
    check(!catalog.find("no such tensor"), "what is not there is not found");

    hoistway::Reader reader;
    hoistway::Batch batch = reader.submit(reads, HOISTWAY_PREFETCH);
    batch.promote();
    batch.wait_read(0);
    batch.wait();
    check(batch.wait_for(0), "it has ended");
    check(batch.error(0).empty(), "nothing went wrong");
    std::uint64_t told = 0;
    while (batch.next_ended(0)) {
        ++told;
    }
    check(told == catalog.size(), "each read is told once");
    check(batch.report().find("\"carriers\"") != std::string::npos, "there is a report");
    for (std::uint64_t index = 0; index < catalog.size(); ++index) {
        hoistway_tensor tensor = catalog[index];
        std::ifstream file(tensor.path, std::ios::binary);
        std::vector<char> expected(tensor.bytes);
        file.seekg(static_cast<std::streamoff>(tensor.offset));
        file.read(expected.data(), static_cast<std::streamsize>(expected.size()));
        check(file.good() && expected == memory[index], "the bytes are the file's");
        check(batch.status(index) == HOISTWAY_OK, "the read says so");
    }

    reads[0].offset = std::uint64_t(1) << 60;
    hoistway::Batch broken = reader.submit(reads);
    try {
        broken.wait();
        check(false, "a read that fails throws");
    } catch (const hoistway::Error& error) {
        check(error.status() == HOISTWAY_TRUNCATED, "the exception has the status");
        check(std::strstr(error.what(), catalog[0].name) != nullptr, "and names the tensor");
    }
    try {
        hoistway::Catalog missing({"/does/not/exist"});
        check(false, "a file that is not there throws");
    } catch (const hoistway::Error& error) {
        check(error.status() == HOISTWAY_NOT_FOUND, "what is not there is not found");
    }
    std::puts("ok");
}
