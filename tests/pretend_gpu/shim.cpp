// The C++ half of a pretended GPU: what torch asks of a CUDA device guard, kept per thread. No CUDA, no memory.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <atomic>
#include <cstdlib>

using namespace c10;
namespace {
int gpus() { return std::atoi(std::getenv("PRETEND_GPUS")); }
thread_local int8_t device_now = 0;       // a new thread's device is 0
thread_local int64_t current[64] = {};    // this thread's stream on each device
std::atomic<int64_t> made = 0;
long (*on_record)(int, long) = nullptr;   // (device, stream) -> event
void (*on_block)(long, int, long) = nullptr;

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(type(), device_now); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) device_now = d.index();
  }
  void setDevice(Device d) const override { uncheckedSetDevice(d); }
  Device exchangeDevice(Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  int8_t at(Device d) const { return d.index() < 0 ? device_now : d.index(); }
  Stream of(int8_t i, int64_t id) const { return Stream(Stream::UNSAFE, Device(type(), i), id); }
  Stream getStream(Device d) const override { return of(at(d), current[at(d)]); }
  Stream getDefaultStream(Device d) const override { return of(at(d), 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return of(at(d), ++made); }
  Stream getNewStream(Device d, int) const override { return of(at(d), ++made); }
  Stream exchangeStream(Stream s) const override {
    auto i = s.device_index();
    auto old = of(i, current[i]);
    current[i] = s.id();
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return gpus(); }
  void record(void** e, const Stream& s, const DeviceIndex, const EventFlag) const override {
    if (on_record) *e = (void*)on_record(s.device_index(), s.id());
  }
  void block(void* e, const Stream& s) const override {
    if (on_block && e) on_block((long)e, s.device_index(), s.id());
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return gpus(); }
  DeviceIndex current_device() const override { return device_now; }
  int getNumGPUs() const override { return gpus(); }
  void deviceSynchronize(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return device_now; }
};

struct DDPTimer final : c10d::Timer {  // torch's DistributedDataParallel wants one for its device
  explicit DDPTimer(Device) {}
  std::optional<int64_t> measureDifference(Event a, Event b) override {
    return getTimeRef(b) - getTimeRef(a);
  }
};
}  // namespace

namespace c10d { C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, DDPTimer) }

extern "C" {
void pretend_start(long (*r)(int, long), void (*b)(long, int, long)) {
  on_record = r;
  on_block = b;
  impl::registerDeviceGuard(DeviceType::CUDA, new Guard);
  static Hooks hooks;  // torch may have made its own already, which knows no GPU: let that one have our functions
  *(void**)const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks()) = *(void**)&hooks;
}
int pretend_device() { return device_now; }
void pretend_set_device(int i) { device_now = i; }
long pretend_stream(int i) { return current[i]; }
void pretend_set_stream(int i, long id) { current[i] = id; }
long pretend_new_stream() { return ++made; }
}
