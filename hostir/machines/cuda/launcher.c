/* Runs tapes: flat lists of driver calls whose addresses and streams change from call to call.
 *
 * hostir/machines/cuda/tape.py describes tapes. The constructor of a tape copies everything that a run needs, so a run
 * allocates nothing. A run replaces the addresses that have changed, and then makes the driver calls one by one.
 *
 * The driver's library is opened at run time. So this module builds where there is no driver, and a test can put a
 * library that records its calls in the driver's place.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

#define MAX_ATTRIBUTES 4
#define ALIGNMENT 64 /* of a CUtensorMap */

typedef enum { LAUNCH, MEMORY, COPY, ROWS, RECORD, WAIT, KINDS } Kind;

/* One call of the driver. `place` is the index of the plan's step that makes it, for messages. */
typedef struct {
  Kind kind;
  int place;
  unsigned stream;
  union {
    struct {
      CUlaunchConfig config;
      CUlaunchAttribute attributes[MAX_ATTRIBUTES];
      CUfunction function;
      void **parameters;
      char *image; /* the parameters themselves */
      size_t size;
    } launch;
    struct {
      CUstreamBatchMemOpParams *ops;
      unsigned count;
    } memory;
    struct {
      CUdeviceptr target, source;
      size_t size;
    } copy;
    CUDA_MEMCPY2D rows;
    CUevent event;
  };
} Entry;

/* A place in the bytes of an entry that holds a slot's address plus an offset: plain, or in a tensor map. */
typedef struct {
  unsigned slot;
  int is_map;
  int64_t offset;
  void *where;
} Patch;

typedef struct {
  PyObject_HEAD
  Py_ssize_t entries, patches, slots, streams, released;
  Entry *entry;
  Patch *patch;       /* sorted by slot */
  Py_ssize_t *first;  /* the first patch of each slot, and then the number of patches */
  uint64_t *address;  /* the address of each slot in the latest run */
  CUstream *stream;
  int running;
} Tape;

static struct {
  void *library;
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig *, CUfunction, void **, void **);
  CUresult (*cuStreamBatchMemOp_v2)(CUstream, unsigned, CUstreamBatchMemOpParams *, unsigned);
  CUresult (*cuMemcpyAsync)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
  CUresult (*cuMemcpy2DAsync_v2)(const CUDA_MEMCPY2D *, CUstream);
  CUresult (*cuEventRecord)(CUevent, CUstream);
  CUresult (*cuStreamWaitEvent)(CUstream, CUevent, unsigned);
  CUresult (*cuTensorMapReplaceAddress)(CUtensorMap *, void *);
  CUresult (*cuGetErrorString)(CUresult, const char **);
} driver;

/* ---- the driver */

static int find(const char *name, void *where) {
  void *symbol = dlsym(driver.library, name);
  if (symbol == NULL) {
    PyErr_Format(PyExc_OSError, "the CUDA driver has no %s", name);
    return -1;
  }
  memcpy(where, &symbol, sizeof symbol);
  return 0;
}

PyDoc_STRVAR(open_doc, "open(path)\n--\n\nOpen the CUDA driver's library. Raises OSError if it cannot be used.");

static PyObject *open_driver(PyObject *module, PyObject *arguments) {
  (void)module;
  const char *path;
  if (!PyArg_ParseTuple(arguments, "s", &path))
    return NULL;
  driver.library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (driver.library == NULL) {
    PyErr_SetString(PyExc_OSError, dlerror());
    return NULL;
  }
  if (find("cuLaunchKernelEx", &driver.cuLaunchKernelEx) || find("cuStreamBatchMemOp_v2", &driver.cuStreamBatchMemOp_v2) ||
      find("cuMemcpyAsync", &driver.cuMemcpyAsync) || find("cuMemcpy2DAsync_v2", &driver.cuMemcpy2DAsync_v2) ||
      find("cuEventRecord", &driver.cuEventRecord) || find("cuStreamWaitEvent", &driver.cuStreamWaitEvent) ||
      find("cuTensorMapReplaceAddress", &driver.cuTensorMapReplaceAddress) ||
      find("cuGetErrorString", &driver.cuGetErrorString))
    return NULL;
  Py_RETURN_NONE;
}

/* ---- running */

static CUresult issue(Entry *entry, CUstream stream) {
  switch (entry->kind) {
  case LAUNCH:
    entry->launch.config.hStream = stream;
    return driver.cuLaunchKernelEx(&entry->launch.config, entry->launch.function, entry->launch.parameters, NULL);
  case MEMORY:
    return driver.cuStreamBatchMemOp_v2(stream, entry->memory.count, entry->memory.ops, 0);
  case COPY:
    if (entry->copy.target == entry->copy.source) /* the caller has written the tensor in place */
      return CUDA_SUCCESS;
    return driver.cuMemcpyAsync(entry->copy.target, entry->copy.source, entry->copy.size, stream);
  case ROWS:
    if (entry->rows.dstDevice == entry->rows.srcDevice)
      return CUDA_SUCCESS;
    return driver.cuMemcpy2DAsync_v2(&entry->rows, stream);
  case RECORD:
    return driver.cuEventRecord(entry->event, stream);
  case WAIT:
    return driver.cuStreamWaitEvent(stream, entry->event, 0);
  default:
    return CUDA_ERROR_INVALID_VALUE;
  }
}

static CUresult patch(Tape *tape, Py_ssize_t slot, uint64_t address) {
  for (Py_ssize_t i = tape->first[slot]; i < tape->first[slot + 1]; i++) {
    Patch *each = &tape->patch[i];
    uint64_t value = address + (uint64_t)each->offset;
    if (!each->is_map) {
      memcpy(each->where, &value, sizeof value);
      continue;
    }
    CUresult code = driver.cuTensorMapReplaceAddress(each->where, (void *)(uintptr_t)value);
    if (code != CUDA_SUCCESS)
      return code;
  }
  tape->address[slot] = address;
  return CUDA_SUCCESS;
}

static CUresult issue_all(Tape *tape, Py_ssize_t *at) {
  for (*at = 0; *at < tape->entries; ++*at) {
    Entry *entry = &tape->entry[*at];
    CUresult code = issue(entry, tape->stream[entry->stream]);
    if (code != CUDA_SUCCESS)
      return code;
  }
  return CUDA_SUCCESS;
}

/* Return (place, message) for an error of the driver. */
static PyObject *failure(int place, CUresult code) {
  const char *text = NULL;
  driver.cuGetErrorString(code, &text);
  return Py_BuildValue("iN", place, PyUnicode_FromFormat("%s (CUDA error %d)", text ? text : "unknown error", (int)code));
}

static int read_addresses(Tape *tape, PyObject *addresses, CUresult *code) {
  for (Py_ssize_t slot = 0; slot < tape->slots; slot++) {
    uint64_t address = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(addresses, slot));
    if (address == (uint64_t)-1 && PyErr_Occurred())
      return -1;
    if (address != tape->address[slot] && (*code = patch(tape, slot, address)) != CUDA_SUCCESS)
      return 0;
  }
  return 0;
}

PyDoc_STRVAR(run_doc, "run(addresses, streams)\n--\n\n"
                      "Issue all entries, with an address for each slot and a handle for each stream.\n\n"
                      "Returns None, or the place of the entry that failed and the driver's message.");

static PyObject *run(Tape *tape, PyObject *const *arguments, Py_ssize_t count) {
  if (count != 2 || !PyTuple_CheckExact(arguments[0]) || !PyTuple_CheckExact(arguments[1]) ||
      PyTuple_GET_SIZE(arguments[0]) != tape->slots || PyTuple_GET_SIZE(arguments[1]) != tape->streams)
    return PyErr_Format(PyExc_TypeError, "expected a tuple of %zd addresses and a tuple of %zd streams", tape->slots,
                        tape->streams);
  if (driver.library == NULL || tape->running)
    return PyErr_Format(PyExc_RuntimeError, driver.library ? "the tape is run by another thread" : "no driver is open");
  for (Py_ssize_t i = 0; i < tape->streams; i++) {
    uint64_t handle = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(arguments[1], i));
    if (handle == (uint64_t)-1 && PyErr_Occurred())
      return NULL;
    tape->stream[i] = (CUstream)(uintptr_t)handle;
  }
  CUresult code = CUDA_SUCCESS;
  Py_ssize_t at = 0;
  if (read_addresses(tape, arguments[0], &code))
    return NULL;
  if (code == CUDA_SUCCESS) {
    tape->running = 1;
    PyThreadState *state = tape->entries >= tape->released ? PyEval_SaveThread() : NULL;
    code = issue_all(tape, &at);
    if (state != NULL)
      PyEval_RestoreThread(state);
    tape->running = 0;
  }
  if (code == CUDA_SUCCESS)
    Py_RETURN_NONE;
  return failure(tape->entries ? tape->entry[at].place : 0, code);
}

/* ---- making a tape */

static void *aligned(size_t size) {
  void *memory = NULL;
  if (posix_memalign(&memory, ALIGNMENT, size ? size : 1)) {
    PyErr_NoMemory();
    return NULL;
  }
  return memory;
}

/* A launch: (function, programs, threads, shared bytes, CTAs of a cluster, dependent, cooperative, image, offsets). */
static int make_launch(Entry *entry, PyObject *fields) {
  unsigned long long function;
  unsigned programs, threads, shared, ctas;
  int dependent, cooperative, made = 0;
  const char *image;
  Py_ssize_t size, count;
  PyObject *offsets;
  if (!PyArg_ParseTuple(fields, "KIIIIppy#O!", &function, &programs, &threads, &shared, &ctas, &dependent, &cooperative,
                        &image, &size, &PyTuple_Type, &offsets))
    return -1;
  count = PyTuple_GET_SIZE(offsets);
  CUlaunchConfig *config = &entry->launch.config;
  *config = (CUlaunchConfig){.gridDimX = programs * ctas, .gridDimY = 1, .gridDimZ = 1, .blockDimX = threads,
                             .blockDimY = 1, .blockDimZ = 1, .sharedMemBytes = shared};
  CUlaunchAttribute *attributes = entry->launch.attributes;
  if (dependent) {
    attributes[made].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[made++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (cooperative) {
    attributes[made].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[made++].value.cooperative = 1;
  }
  if (ctas != 1) {
    attributes[made].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[made].value.clusterDim.x = ctas;
    attributes[made].value.clusterDim.y = 1;
    attributes[made++].value.clusterDim.z = 1;
    attributes[made].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE;
    attributes[made++].value.clusterSchedulingPolicyPreference = CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
  }
  config->attrs = attributes;
  config->numAttrs = (unsigned)made;
  entry->launch.function = (CUfunction)(uintptr_t)function;
  entry->launch.size = (size_t)size;
  entry->launch.image = aligned((size_t)size);
  entry->launch.parameters = calloc((size_t)count + 1, sizeof(void *));
  if (entry->launch.image == NULL)
    return -1;
  if (entry->launch.parameters == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  memcpy(entry->launch.image, image, (size_t)size);
  for (Py_ssize_t i = 0; i < count; i++) {
    Py_ssize_t offset = PyLong_AsSsize_t(PyTuple_GET_ITEM(offsets, i));
    if (offset < 0 || offset >= size) {
      PyErr_SetString(PyExc_ValueError, "a parameter lies outside the image");
      return -1;
    }
    entry->launch.parameters[i] = entry->launch.image + offset;
  }
  return 0;
}

/* Operations on memory: bytes of an array of CUstreamBatchMemOpParams. */
static int make_memory(Entry *entry, PyObject *fields) {
  const char *image;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(fields, "y#", &image, &size))
    return -1;
  if (size % (Py_ssize_t)sizeof(CUstreamBatchMemOpParams)) {
    PyErr_SetString(PyExc_ValueError, "not an array of CUstreamBatchMemOpParams");
    return -1;
  }
  entry->memory.count = (unsigned)(size / (Py_ssize_t)sizeof(CUstreamBatchMemOpParams));
  entry->memory.ops = aligned((size_t)size);
  if (entry->memory.ops == NULL)
    return -1;
  memcpy(entry->memory.ops, image, (size_t)size);
  return 0;
}

static int make_rows(Entry *entry, PyObject *fields) {
  const char *image;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(fields, "y#", &image, &size))
    return -1;
  if (size != (Py_ssize_t)sizeof(CUDA_MEMCPY2D)) {
    PyErr_SetString(PyExc_ValueError, "not a CUDA_MEMCPY2D");
    return -1;
  }
  memcpy(&entry->rows, image, sizeof(CUDA_MEMCPY2D));
  return 0;
}

static int make_copy(Entry *entry, PyObject *fields) {
  unsigned long long target, source;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(fields, "KKn", &target, &source, &size))
    return -1;
  entry->copy.target = target;
  entry->copy.source = source;
  entry->copy.size = (size_t)size;
  return 0;
}

static int make_event(Entry *entry, PyObject *fields) {
  unsigned long long event;
  if (!PyArg_ParseTuple(fields, "K", &event))
    return -1;
  entry->event = (CUevent)(uintptr_t)event;
  return 0;
}

static int make_entry(Tape *tape, Entry *entry, PyObject *row) {
  int kind;
  PyObject *fields;
  if (!PyArg_ParseTuple(row, "iiIO!", &kind, &entry->place, &entry->stream, &PyTuple_Type, &fields))
    return -1;
  if (kind < 0 || kind >= KINDS || entry->stream >= tape->streams) {
    PyErr_SetString(PyExc_ValueError, "an unknown kind of entry, or a stream that the tape does not have");
    return -1;
  }
  entry->kind = (Kind)kind;
  switch (entry->kind) {
  case LAUNCH:
    return make_launch(entry, fields);
  case MEMORY:
    return make_memory(entry, fields);
  case COPY:
    return make_copy(entry, fields);
  case ROWS:
    return make_rows(entry, fields);
  default:
    return make_event(entry, fields);
  }
}

/* Return the memory in which an entry holds addresses, and its size. */
static char *holder(Entry *entry, size_t *size) {
  switch (entry->kind) {
  case LAUNCH:
    *size = entry->launch.size;
    return entry->launch.image;
  case MEMORY:
    *size = entry->memory.count * sizeof(CUstreamBatchMemOpParams);
    return (char *)entry->memory.ops;
  case COPY:
    *size = 2 * sizeof(CUdeviceptr);
    return (char *)&entry->copy.target;
  case ROWS:
    *size = sizeof(CUDA_MEMCPY2D);
    return (char *)&entry->rows;
  default:
    *size = 0;
    return NULL;
  }
}

/* A patch: (slot, entry, offset in the entry's bytes, offset to add to the slot's address, True if in a tensor map). */
static int make_patch(Tape *tape, Patch *each, PyObject *row) {
  Py_ssize_t entry, offset;
  long long addend;
  size_t size;
  if (!PyArg_ParseTuple(row, "InnLp", &each->slot, &entry, &offset, &addend, &each->is_map))
    return -1;
  if (each->slot >= tape->slots || entry < 0 || entry >= tape->entries || offset < 0) {
    PyErr_SetString(PyExc_ValueError, "a patch of a slot or an entry that the tape does not have");
    return -1;
  }
  char *base = holder(&tape->entry[entry], &size);
  if ((size_t)offset + sizeof(uint64_t) > size) {
    PyErr_SetString(PyExc_ValueError, "a patch outside its entry");
    return -1;
  }
  each->offset = addend;
  each->where = base + offset;
  return 0;
}

static void tape_free(Tape *tape) {
  for (Py_ssize_t i = 0; tape->entry != NULL && i < tape->entries; i++) {
    if (tape->entry[i].kind == LAUNCH) {
      free(tape->entry[i].launch.image);
      free(tape->entry[i].launch.parameters);
    } else if (tape->entry[i].kind == MEMORY) {
      free(tape->entry[i].memory.ops);
    }
  }
  free(tape->entry);
  free(tape->patch);
  free(tape->first);
  free(tape->address);
  free(tape->stream);
  Py_TYPE(tape)->tp_free(tape);
}

static int make_patches(Tape *tape, PyObject *patches) {
  unsigned before = 0;
  for (Py_ssize_t i = 0; i < tape->patches; i++) {
    Patch *each = &tape->patch[i];
    if (make_patch(tape, each, PyTuple_GET_ITEM(patches, i)))
      return -1;
    if (each->slot < before) {
      PyErr_SetString(PyExc_ValueError, "patches are not sorted by slot");
      return -1;
    }
    before = each->slot;
    tape->first[each->slot + 1] = i + 1;
  }
  for (Py_ssize_t slot = 0; slot < tape->slots; slot++) /* slots without patches */
    if (tape->first[slot + 1] < tape->first[slot])
      tape->first[slot + 1] = tape->first[slot];
  return 0;
}

static PyObject *tape_new(PyTypeObject *type, PyObject *arguments, PyObject *options) {
  static char *names[] = {"entries", "patches", "slots", "streams", "released", NULL};
  PyObject *entries, *patches;
  Py_ssize_t slots, streams, released;
  if (!PyArg_ParseTupleAndKeywords(arguments, options, "O!O!nnn", names, &PyTuple_Type, &entries, &PyTuple_Type,
                                   &patches, &slots, &streams, &released))
    return NULL;
  Tape *tape = (Tape *)type->tp_alloc(type, 0);
  if (tape == NULL)
    return NULL;
  tape->entries = PyTuple_GET_SIZE(entries);
  tape->patches = PyTuple_GET_SIZE(patches);
  tape->slots = slots;
  tape->streams = streams;
  tape->released = released;
  tape->entry = calloc((size_t)tape->entries + 1, sizeof(Entry));
  tape->patch = calloc((size_t)tape->patches + 1, sizeof(Patch));
  tape->first = calloc((size_t)slots + 2, sizeof(Py_ssize_t));
  tape->address = calloc((size_t)slots + 1, sizeof(uint64_t));
  tape->stream = calloc((size_t)streams + 1, sizeof(CUstream));
  if (!tape->entry || !tape->patch || !tape->first || !tape->address || !tape->stream) {
    PyErr_NoMemory();
    goto failed;
  }
  for (Py_ssize_t i = 0; i < slots; i++)
    tape->address[i] = UINT64_MAX; /* no address yet */
  for (Py_ssize_t i = 0; i < tape->entries; i++) {
    tape->entry[i].kind = KINDS; /* nothing to free yet */
    if (make_entry(tape, &tape->entry[i], PyTuple_GET_ITEM(entries, i)))
      goto failed;
  }
  if (make_patches(tape, patches) == 0)
    return (PyObject *)tape;
failed:
  Py_DECREF(tape);
  return NULL;
}

static PyMethodDef tape_methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, run_doc},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject TapeType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "hostir_launcher.Tape",
    .tp_doc = PyDoc_STR("Tape(entries, patches, slots, streams, released)\n--\n\n"
                        "A list of driver calls. A run of `released` entries or more releases the GIL."),
    .tp_basicsize = sizeof(Tape),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = tape_new,
    .tp_dealloc = (destructor)tape_free,
    .tp_methods = tape_methods,
};

static PyMethodDef functions[] = {
    {"open", open_driver, METH_VARARGS, open_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "hostir_launcher",
    .m_doc = "Runs tapes of driver calls.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit_hostir_launcher(void) {
  if (PyType_Ready(&TapeType) < 0)
    return NULL;
  PyObject *made = PyModule_Create(&module);
  if (made == NULL || PyModule_AddObjectRef(made, "Tape", (PyObject *)&TapeType) == 0)
    return made;
  Py_DECREF(made);
  return NULL;
}
