// A CUDA device that is made of the CPU, so that what fpipe does on CUDA runs where there is none.
//
// Tensors on it are tensors of torch with the key CUDA, on memory of the CPU that says it is the
// device's. An operation takes the same memory as CPU tensors, runs the CPU's kernel, and gives
// what comes out back to the device. Like a real device it refuses to compute with tensors that
// lie elsewhere, and it counts how often the host asks for a number, or for a copy to be there, and
// so would have to wait. Before a kernel runs for the first time it is loaded, which waits for all
// that the device has been asked for. Everything runs at once: it shows where values lie and who
// waits.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <mutex>
#include <set>

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Storage;
using c10::Stream;
using c10::TensorImpl;

namespace {

constexpr DeviceIndex kDevices = 2;
thread_local DeviceIndex current = 0;
thread_local c10::StreamId streams[kDevices] = {0};
long waits = 0;
bool (*idle)() = nullptr;  // waits until the device is, and tells whether it came to be

Device device_of(DeviceIndex index) {
  return Device(DeviceType::CUDA, index < 0 ? current : index);
}

// ── memory, devices and streams ──────────────────────────────────────────────────────────────────

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    // Kernels give the same bits only if memory is aligned as the CPU's own is.
    void* memory = size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    return {memory, memory, &std::free, device_of(-1)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

Memory memory;
REGISTER_ALLOCATOR(DeviceType::CUDA, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    Device before = device_of(-1);
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return device_of(-1); }
  void setDevice(Device device) const override { current = device_of(device.index()).index(); }
  void uncheckedSetDevice(Device device) const noexcept override { setDevice(device); }
  Stream getStream(Device device) const override {
    Device own = device_of(device.index());
    return Stream(Stream::UNSAFE, own, streams[own.index()]);
  }
  Stream getNewStream(Device device, int) const override {
    static c10::StreamId latest = 0;
    return Stream(Stream::UNSAFE, device_of(device.index()), ++latest);
  }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    *event = &waits;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

c10::impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new Guard());

// ── kernels ──────────────────────────────────────────────────────────────────────────────────────

// Which kernel: one for each operation, and for the dtypes, layouts and places of what it is given.
std::string kernel_of(const std::string& operation, c10::ArrayRef<Tensor> tensors) {
  std::string name = operation;
  for (const Tensor& tensor : tensors)
    name += std::string(" ") + c10::toString(tensor.scalar_type()) +
            (tensor.is_contiguous() ? "" : "*") +
            (reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 16 ? "+" : "");
  return name;
}

void load(const std::string& kernel) {
  static std::mutex mutex;
  static std::set<std::string> loaded;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!loaded.insert(kernel).second) return;
  }
  TORCH_CHECK(!idle || idle(), "the device would wait for ever to load ", kernel);
}

// ── operations ───────────────────────────────────────────────────────────────────────────────────

Tensor made(Storage storage, DispatchKeySet keys, const Tensor& like) {
  auto tensor = at::detail::make_tensor<TensorImpl>(std::move(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// The same memory as a tensor of the CPU.
Tensor on_host(const Tensor& tensor) {
  auto size = tensor.storage().nbytes();
  c10::DataPtr data(tensor.storage().mutable_data(), Device(DeviceType::CPU));
  Storage storage(Storage::use_byte_size_t(), size, std::move(data), c10::GetCPUAllocator(), true);
  auto host = made(std::move(storage), DispatchKeySet(DispatchKey::CPU), tensor);
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

// A result of the CPU's on a device; its memory lives as long.
Tensor on_device(const Tensor& result, Device device) {
  auto* kept = new Tensor(result._is_zerotensor() ? at::zeros_like(result) : result);
  c10::DataPtr data(
      kept->storage().mutable_data(), kept, [](void* t) { delete static_cast<Tensor*>(t); }, device);
  auto size = kept->storage().nbytes();
  Storage storage(Storage::use_byte_size_t(), size, std::move(data), &memory, true);
  return made(std::move(storage), DispatchKeySet(DispatchKey::CUDA), *kept);
}

// What an operation is given: tensors of one device, and numbers of the CPU's beside them.
class Arguments {
 public:
  explicit Arguments(std::string operation) : operation_(std::move(operation)) {}

  IValue host(const IValue& value) {
    if (value.isTensor()) return seen(value.toTensor());
    if (value.isTensorList()) {
      std::vector<Tensor> all;
      for (const Tensor& tensor : value.toTensorList()) all.push_back(seen(tensor));
      return all;
    }
    if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<Tensor>> all;
      for (const IValue& one : value.toListRef()) {
        if (!one.isNone() && !one.isTensor()) return value;
        all.push_back(one.isNone() ? std::nullopt : std::optional(seen(one.toTensor())));
      }
      return all;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device_ = device_of(value.toDevice().index());
      return Device(DeviceType::CPU);
    }
    return value;
  }

  // A view has no kernel.
  void load_kernel(const c10::FunctionSchema& schema) const {
    for (const auto& result : schema.returns())
      if (result.alias_info() && !result.alias_info()->isWrite()) return;
    std::vector<Tensor> tensors;
    for (const auto& [own, alias] : pairs_) tensors.push_back(own);
    load(kernel_of(schema.name() + "." + schema.overload_name(), tensors));
  }

  void check() const {
    for (const Tensor& tensor : elsewhere_)
      TORCH_CHECK(
          !device_ || tensor.dim() == 0 || operation_.find("index") != std::string::npos,
          "Expected all tensors to be on the same device, but found ", *device_, " and ",
          tensor.device(), " in ", operation_);
  }

  // A result: an argument that was written to, a view of one, or something new.
  Tensor result(const Tensor& host) const {
    if (!host.defined()) return host;
    for (const auto& [own, alias] : pairs_) {
      if (!alias.is_same(host)) continue;
      if (own.storage().data() != host.storage().data())  // it has been resized
        own.unsafeGetTensorImpl()->set_storage_keep_dtype(on_device(host, where()).storage());
      own.unsafeGetTensorImpl()->set_sizes_and_strides(
          host.sizes(), host.strides(), host.storage_offset());
      return own;
    }
    for (const auto& [own, alias] : pairs_)
      if (host.has_storage() && alias.storage().is_alias_of(host.storage()))
        return viewed(own, host);
    return on_device(host, where());
  }

 private:
  Device where() const { return device_.value_or(device_of(-1)); }

  static Tensor viewed(const Tensor& base, const Tensor& like) {
    auto view = at::detail::make_tensor<TensorImpl>(
        TensorImpl::VIEW, Storage(base.storage()), base.key_set(), like.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(
        like.sizes(), like.strides(), like.storage_offset());
    return view;
  }

  Tensor seen(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda() || (device_ && tensor.device() != *device_)) {
      elsewhere_.push_back(tensor);
      return tensor.is_cuda() ? on_host(tensor) : tensor;
    }
    device_ = tensor.device();
    for (const auto& [own, alias] : pairs_)
      if (own.is_same(tensor)) return alias;
    pairs_.emplace_back(tensor, on_host(tensor));
    return pairs_.back().second;
  }

  std::string operation_;
  std::optional<Device> device_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
  std::vector<Tensor> elsewhere_;
};

void compute(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  Arguments arguments(schema.name());
  for (auto value = stack->end() - schema.arguments().size(); value != stack->end(); ++value)
    *value = arguments.host(*value);
  arguments.check();
  arguments.load_kernel(schema);
  operation.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  for (auto value = stack->end() - schema.returns().size(); value != stack->end(); ++value) {
    if (value->isTensor()) {
      *value = arguments.result(value->toTensor());
    } else if (value->isTensorList()) {
      std::vector<Tensor> all;
      for (const Tensor& tensor : value->toTensorList()) all.push_back(arguments.result(tensor));
      *value = all;
    }
  }
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard here(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, DispatchKeySet(DispatchKey::CUDA),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard here(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_cuda() != from.is_cuda() && !non_blocking) ++waits;
  bool as_it_is = to.is_contiguous() && from.is_contiguous() && to.dtype() == from.dtype();
  if (!as_it_is) load(kernel_of("copy_", {to, from}));
  (to.is_cuda() ? on_host(to) : to).copy_(from.is_cuda() ? on_host(from) : from);
  return to;
}

at::Scalar item(const Tensor& tensor) {
  ++waits;
  return at::_local_scalar_dense(on_host(tensor));
}

c10::KernelFunction computing() {
  return c10::KernelFunction::makeFromBoxedFunction<&compute>();
}

// By way of the dispatcher alone, for torch/library.h takes long to compile.
std::vector<c10::RegistrationHandleRAII> registered = [] {
  std::vector<c10::RegistrationHandleRAII> found;
  auto& dispatcher = c10::Dispatcher::singleton();
  auto add = [&](const c10::OperatorName& name, c10::KernelFunction kernel) {
    found.push_back(dispatcher.registerImpl(
        name, DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr, "emulated"));
  };
  using Kernel = c10::KernelFunction;
  add({"aten::empty", "memory_format"}, Kernel::makeFromUnboxedRuntimeFunction(&empty));
  add({"aten::empty_strided", ""}, Kernel::makeFromUnboxedRuntimeFunction(&empty_strided));
  add({"aten::copy_", ""}, Kernel::makeFromUnboxedRuntimeFunction(&copy_));
  add({"aten::_local_scalar_dense", ""}, Kernel::makeFromUnboxedRuntimeFunction(&item));
  found.push_back(dispatcher.registerFallback(DispatchKey::CUDA, computing(), "emulated"));
  // One by one as well: torch decides by what is registered how it takes an operation apart.
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto operation = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) == 0 && operation &&
        operation->hasKernelForDispatchKey(DispatchKey::CPU) &&
        !operation->hasKernelForDispatchKey(DispatchKey::CUDA))
      add(name, computing());
  }
  return found;
}();

}  // namespace

// What torch asks of CUDA; the name is that of torch's own, which is not there.
namespace at {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(current, device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return std::exchange(current, device < 0 ? current : device);
  }
  Allocator* getCUDADeviceAllocator() const override { return &memory; }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  Generator getNewGenerator(DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

extern "C" {
long waits_for_numbers() { return waits; }
void ask_whether_idle(bool (*function)()) { idle = function; }
int number_of_devices() { return kDevices; }
}
