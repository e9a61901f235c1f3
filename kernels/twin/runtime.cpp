// What Python asks of the twin: memory, errors, and the report of the last run.
#include <cstdio>

#include "tikicpulib.h"

namespace {

using AscendC::twin::Fleet;
using AscendC::twin::GlobalMemory;

std::string text;

void Append(std::string* to, const char* name, const std::map<std::string, double>& values) {
  *to += std::string("\"") + name + "\": {";
  for (const auto& [key, value] : values) {
    char number[64];
    std::snprintf(number, sizeof number, "\": %.17g, ", value);
    *to += "\"" + key + number;
  }
  if (!values.empty()) to->resize(to->size() - 2);
  *to += "}";
}

}  // namespace

extern "C" {

void* twin_allocate(int64_t bytes, int64_t watched) {
  GlobalMemory::The().watched = watched != 0;
  return AscendC::GmAlloc(static_cast<size_t>(bytes));
}

// NULL, or the text of a fault.
const char* twin_free(void* begin) {
  try {
    AscendC::GmFree(begin);
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}

using Run = void (*)(uint8_t**, uint8_t*, uint8_t*, uint32_t);

const char* twin_run(Run run, uint8_t** gm, uint8_t* workspace, uint8_t* tiling, uint32_t blocks) {
  try {
    run(gm, workspace, tiling, blocks);
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}

// JSON: one object per core.
const char* twin_report() {
  text = "[";
  for (const auto& core : Fleet::Cores()) {
    const auto& c = core->counters;
    std::map<std::string, double> busy;
    for (int pipe : {PIPE_S, PIPE_V, PIPE_M, PIPE_MTE2, PIPE_MTE3}) {
      busy[AscendC::twin::PipeName(pipe)] = core->clock.Busy(pipe);
    }
    text += text.size() > 1 ? ", {" : "{";
    Append(&text, "busy", busy);
    text += ", ";
    Append(&text, "bytes", c.bytes);
    text += ", ";
    Append(&text, "elements", c.elements);
    text += ", ";
    Append(&text, "cycles", c.cycles);
    text += ", ";
    Append(&text, "instructions", c.instructions);
    text += ", ";
    Append(&text, "totals",
           {{"macs", c.macs},
            {"cube", c.cubeCycles},
            {"cube load", c.cubeLoadCycles},
            {"cube store", c.cubeStoreCycles},
            {"finish", core->clock.Finish()}});
    text += "}";
  }
  text += "]";
  return text.c_str();
}

}
