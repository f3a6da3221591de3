#include "device.h"

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <cstdlib>
#include <cstring>

namespace {

constexpr const char * NAME = "CUDA0";
constexpr size_t ALIGNMENT = 128;
constexpr size_t MEMORY = size_t { 64 } << 30;

extern ggml_backend_buffer_type buffer_type;
extern ggml_backend_device device;

const ggml_backend_buffer_i BUFFER = [] {
    ggml_backend_buffer_i result {};
    result.free_buffer = [](ggml_backend_buffer_t buffer) { std::free(buffer->context); };
    result.get_base = [](ggml_backend_buffer_t buffer) { return buffer->context; };
    result.memset_tensor = [](ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
        std::memset(static_cast<char *>(tensor->data) + offset, value, size);
    };
    result.set_tensor = [](ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
        std::memcpy(static_cast<char *>(tensor->data) + offset, data, size);
    };
    result.get_tensor = [](ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
        std::memcpy(data, static_cast<const char *>(tensor->data) + offset, size);
    };
    result.clear = [](ggml_backend_buffer_t buffer, uint8_t value) {
        std::memset(buffer->context, value, buffer->size);
    };
    return result;
}();

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t size) {
    void * memory = std::aligned_alloc(ALIGNMENT, (size / ALIGNMENT + 1) * ALIGNMENT);
    return memory ? ggml_backend_buffer_init(type, BUFFER, memory, size) : nullptr;
}

ggml_backend_t make_backend(ggml_backend_dev_t, const char *) {
    static ggml_guid guid = { 'c', 'u', 'd', 'a', '-', 'o', 'f', '-', 't', 'e', 's', 't', 's' };
    ggml_backend_i functions {};
    functions.get_name = [](ggml_backend_t) { return NAME; };
    functions.free = [](ggml_backend_t backend) {
        ggml_backend_free(static_cast<ggml_backend_t>(backend->context));
        delete backend;
    };
    functions.graph_compute = [](ggml_backend_t backend, ggml_cgraph * graph) {
        return ggml_backend_graph_compute(static_cast<ggml_backend_t>(backend->context), graph);
    };
    ggml_backend_t processor = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(processor, 1);
    return new ggml_backend { &guid, functions, &device, processor };
}

const char * device_name(ggml_backend_dev_t) {
    return NAME;
}

void device_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free = *total = MEMORY;
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

void device_properties(ggml_backend_dev_t, ggml_backend_dev_props * properties) {
    *properties = { NAME, NAME, MEMORY, MEMORY, GGML_BACKEND_DEVICE_TYPE_GPU, "0000:0a:00.0", {} };
}

ggml_backend_reg registry = [] {
    ggml_backend_reg result {};
    result.api_version = GGML_BACKEND_API_VERSION;
    result.iface.get_name = [](ggml_backend_reg_t) { return "CUDA"; };
    result.iface.get_device_count = [](ggml_backend_reg_t) { return size_t { 1 }; };
    result.iface.get_device = [](ggml_backend_reg_t, size_t) { return &device; };
    return result;
}();

ggml_backend_device device = [] {
    ggml_backend_device result {};
    result.reg = &registry;
    result.iface.get_name = device_name;
    result.iface.get_description = device_name;
    result.iface.get_memory = device_memory;
    result.iface.get_type = device_type;
    result.iface.get_props = device_properties;
    result.iface.init_backend = make_backend;
    result.iface.get_buffer_type = [](ggml_backend_dev_t) { return &buffer_type; };
    result.iface.supports_op = [](ggml_backend_dev_t, const ggml_tensor *) { return true; };
    result.iface.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
        return type == &buffer_type;
    };
    return result;
}();

ggml_backend_buffer_type buffer_type = [] {
    ggml_backend_buffer_type result {};
    result.device = &device;
    result.iface.get_name = [](ggml_backend_buffer_type_t) { return NAME; };
    result.iface.alloc_buffer = allocate;
    result.iface.get_alignment = [](ggml_backend_buffer_type_t) { return ALIGNMENT; };
    return result;
}();

} // namespace

void register_device() {
    ggml_backend_register(&registry);
}
