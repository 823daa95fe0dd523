/* Runs tapes: flat lists of driver calls whose addresses change from call to call.
 *
 * hostir/machines/cuda/tape.py describes tapes. The constructor of a tape copies everything that a run needs, so a run
 * allocates nothing. A run reads the addresses of the tensors in its slots, replaces the addresses that have changed,
 * and then makes the driver calls one by one.
 *
 * The libraries of the driver and of NCCL are opened at run time. So this module builds where they are missing, and a
 * test can put a library that records its calls in their place.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cuda.h"

#define MAX_ATTRIBUTES 5
#define MAX_NODES 32 /* of the graph of a product */
#define STACK 65536 /* bytes that a call of cuBLAS may use */
#define ALIGNMENT 64 /* of a CUtensorMap */
#define RING 1022

typedef enum { LAUNCH, MEMORY, COPY, ROWS, MEMSET, RECORD, WAIT, COLLECTIVE, COUNT, KINDS } Kind;

/* What a collective does. */
typedef enum { ALLGATHER, REDUCE_SCATTER, ALLREDUCE, COLLECTIVES } Collective;

/* Numbers of runs of tapes with collectives that a session issues to one stream, in memory that a GPU can write to.
 * `text` is a ring. It holds a number for each of the latest runs, by which the reader finds a text about the run. */
typedef struct {
  volatile int64_t begun; /* by the host */
  volatile int64_t ended; /* by the device */
  volatile int64_t text[RING];
} Counts;

/* One call of the driver, or three for COUNT. `place` is the index of the plan's step that makes it, for messages. */
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
    struct {
      CUdeviceptr target;
      unsigned value, unit; /* the number of bytes that get the value */
      size_t count;         /* of units */
    } set;
    CUevent event;
    struct {
      CUdeviceptr target, source;
      size_t count;
      void *communicator;
      int what, type;
    } collective;
    struct {
      CUstreamBatchMemOpParams op; /* writes the number of the run */
      Counts *counts;
      int64_t text;
      CUstream aside;  /* the stream that writes it, after the event */
      CUevent event;
    } count;
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
  Py_ssize_t entries, patches, slots, streams;
  CUcontext context; /* of the thread that made the tape: each run makes it current */
  Entry *entry;
  Patch *patch;       /* sorted by slot */
  Py_ssize_t *first;  /* the first patch of each slot, and then the number of patches */
  Py_ssize_t *number; /* the number of the register that holds the tensor of each slot */
  uint64_t *address;  /* the address of each slot in the latest run */
  CUstream *stream;
  Entry *count; /* the entry that counts runs with collectives; NULL if there is none */
  int running;
} Tape;

static struct {
  void *library;
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig *, CUfunction, void **, void **);
  CUresult (*cuStreamBatchMemOp_v2)(CUstream, unsigned, CUstreamBatchMemOpParams *, unsigned);
  CUresult (*cuMemcpyAsync)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
  CUresult (*cuMemcpy2DAsync_v2)(const CUDA_MEMCPY2D *, CUstream);
  CUresult (*cuMemsetD8Async)(CUdeviceptr, unsigned char, size_t, CUstream);
  CUresult (*cuMemsetD16Async)(CUdeviceptr, unsigned short, size_t, CUstream);
  CUresult (*cuMemsetD32Async)(CUdeviceptr, unsigned, size_t, CUstream);
  CUresult (*cuEventRecord)(CUevent, CUstream);
  CUresult (*cuStreamWaitEvent)(CUstream, CUevent, unsigned);
  CUresult (*cuTensorMapReplaceAddress)(CUtensorMap *, void *);
  CUresult (*cuGetErrorString)(CUresult, const char **);
  CUresult (*cuCtxGetCurrent)(CUcontext *);
  CUresult (*cuCtxPushCurrent_v2)(CUcontext);
  CUresult (*cuCtxPopCurrent_v2)(CUcontext *);
  CUresult (*cuStreamBeginCapture_v2)(CUstream, CUstreamCaptureMode);
  CUresult (*cuStreamEndCapture)(CUstream, CUgraph *);
  CUresult (*cuGraphDestroy)(CUgraph);
  CUresult (*cuGraphGetNodes)(CUgraph, CUgraphNode *, size_t *);
  CUresult (*cuGraphNodeGetType)(CUgraphNode, CUgraphNodeType *);
  CUresult (*cuGraphMemsetNodeGetParams)(CUgraphNode, CUDA_MEMSET_NODE_PARAMS *);
  CUresult (*cuGraphKernelNodeGetParams_v2)(CUgraphNode, CUDA_KERNEL_NODE_PARAMS *);
  CUresult (*cuGraphKernelNodeGetAttribute)(CUgraphNode, CUlaunchAttributeID, CUlaunchAttributeValue *);
  CUresult (*cuKernelGetFunction)(CUfunction *, CUkernel);
  CUresult (*cuGraphNodeGetDependencies_v2)(CUgraphNode, CUgraphNode *, CUgraphEdgeData *, size_t *);
  CUresult (*cuFuncGetParamInfo)(CUfunction, size_t, size_t *, size_t *);
  CUresult (*cuFuncGetName)(const char **, CUfunction);
} driver;

/* Functions of NCCL, and two values of its enums. Its headers are not needed, as these do not change. */
typedef struct {
  void *library;
  int (*ncclAllGather)(const void *, void *, size_t, int, void *, CUstream);
  int (*ncclReduceScatter)(const void *, void *, size_t, int, int, void *, CUstream);
  int (*ncclAllReduce)(const void *, void *, size_t, int, int, void *, CUstream);
  int (*ncclCommGetAsyncError)(void *, int *);
  const char *(*ncclGetErrorString)(int);
} Nccl;

static Nccl nccl;

#define NCCL_SUM 0
#define NCCL_IN_PROGRESS 7
#define NCCL_ERRORS 100000 /* added to a code of NCCL, to tell it from a CUresult */

static PyObject *driver_error; /* the exception that a run raises for a driver call that fails */
static PyObject *data_ptr;     /* the name of the method that returns the address of a tensor */

/* ---- the driver */

static int find_in(void *library, const char *what, const char *name, void *where) {
  void *symbol = dlsym(library, name);
  if (symbol == NULL) {
    PyErr_Format(PyExc_OSError, "%s has no %s", what, name);
    return -1;
  }
  memcpy(where, &symbol, sizeof symbol);
  return 0;
}

static int find(const char *name, void *where) { return find_in(driver.library, "the CUDA driver", name, where); }

PyDoc_STRVAR(open_doc, "open(path, error)\n--\n\nOpen the CUDA driver's library. Raises OSError if it cannot be used.\n\n"
                       "`error` is the class of the exception that runs raise: error(place, message).");

static PyObject *open_driver(PyObject *module, PyObject *arguments) {
  (void)module;
  const char *path;
  PyObject *error;
  if (!PyArg_ParseTuple(arguments, "sO", &path, &error))
    return NULL;
  driver.library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (driver.library == NULL) {
    PyErr_SetString(PyExc_OSError, dlerror());
    return NULL;
  }
  if (find("cuLaunchKernelEx", &driver.cuLaunchKernelEx) || find("cuStreamBatchMemOp_v2", &driver.cuStreamBatchMemOp_v2) ||
      find("cuMemcpyAsync", &driver.cuMemcpyAsync) || find("cuMemcpy2DAsync_v2", &driver.cuMemcpy2DAsync_v2) ||
      find("cuMemsetD8Async", &driver.cuMemsetD8Async) || find("cuMemsetD16Async", &driver.cuMemsetD16Async) ||
      find("cuMemsetD32Async", &driver.cuMemsetD32Async) || find("cuEventRecord", &driver.cuEventRecord) ||
      find("cuStreamWaitEvent", &driver.cuStreamWaitEvent) ||
      find("cuTensorMapReplaceAddress", &driver.cuTensorMapReplaceAddress) ||
      find("cuGetErrorString", &driver.cuGetErrorString) || find("cuCtxGetCurrent", &driver.cuCtxGetCurrent) ||
      find("cuCtxPushCurrent_v2", &driver.cuCtxPushCurrent_v2) || find("cuCtxPopCurrent_v2", &driver.cuCtxPopCurrent_v2) ||
      find("cuStreamBeginCapture_v2", &driver.cuStreamBeginCapture_v2) ||
      find("cuStreamEndCapture", &driver.cuStreamEndCapture) || find("cuGraphDestroy", &driver.cuGraphDestroy) ||
      find("cuGraphGetNodes", &driver.cuGraphGetNodes) || find("cuGraphNodeGetType", &driver.cuGraphNodeGetType) ||
      find("cuGraphMemsetNodeGetParams", &driver.cuGraphMemsetNodeGetParams) ||
      find("cuGraphKernelNodeGetParams_v2", &driver.cuGraphKernelNodeGetParams_v2) ||
      find("cuGraphKernelNodeGetAttribute", &driver.cuGraphKernelNodeGetAttribute) ||
      find("cuKernelGetFunction", &driver.cuKernelGetFunction)) {
    driver.library = NULL;
    return NULL;
  }
  if (find("cuFuncGetName", &driver.cuFuncGetName) || find("cuFuncGetParamInfo", &driver.cuFuncGetParamInfo) ||
      find("cuGraphNodeGetDependencies_v2", &driver.cuGraphNodeGetDependencies_v2))
    PyErr_Clear(); /* a driver older than CUDA 12.4: only `calls_of` needs them */
  Py_XSETREF(driver_error, Py_NewRef(error));
  Py_RETURN_NONE;
}

PyDoc_STRVAR(open_nccl_doc, "open_nccl(path)\n--\n\n"
                            "Open NCCL in a library that this process has loaded, or in one that it needs.\n\n"
                            "Raises OSError if the library is not loaded, or has no NCCL.");

static PyObject *open_nccl(PyObject *module, PyObject *path) {
  (void)module;
  const char *name = PyUnicode_AsUTF8(path);
  if (name == NULL)
    return NULL;
  Nccl found = {.library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)}; /* the copy of NCCL that made the communicators */
  if (found.library == NULL)
    return PyErr_Format(PyExc_OSError, "%s is not loaded", name);
  if (find_in(found.library, name, "ncclAllGather", &found.ncclAllGather) ||
      find_in(found.library, name, "ncclReduceScatter", &found.ncclReduceScatter) ||
      find_in(found.library, name, "ncclAllReduce", &found.ncclAllReduce) ||
      find_in(found.library, name, "ncclCommGetAsyncError", &found.ncclCommGetAsyncError) ||
      find_in(found.library, name, "ncclGetErrorString", &found.ncclGetErrorString))
    return NULL;
  nccl = found;
  Py_RETURN_NONE;
}

/* ---- the end of the process */

#define LOOK_NS 50000000 /* nanoseconds between two looks at the numbers of runs */

/* What a thread needs that may end the process. */
typedef struct {
  double seconds;
  Py_ssize_t streams;
  Counts **counts;
  int64_t *begun; /* the runs for which it waits, by stream */
  char *message;
} Exit;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* It looks no more once the runs have ended: CUDA may then take back the memory of the numbers. */
static void *end_process(void *argument) {
  Exit *what = argument;
  const struct timespec pause = {0, LOOK_NS};
  double deadline = now() + what->seconds;
  Py_ssize_t i = 0;
  while (i < what->streams) {
    if (what->counts[i]->ended >= what->begun[i]) {
      i++;
    } else if (now() < deadline) {
      nanosleep(&pause, NULL);
    } else {
      ssize_t written = write(STDERR_FILENO, what->message, strlen(what->message));
      (void)written;
      _exit(1);
    }
  }
  return NULL;
}

static void exit_free(Exit *what) {
  free(what->counts);
  free(what->begun);
  free(what->message);
  free(what);
}

PyDoc_STRVAR(exit_unless_ended_doc,
             "exit_unless_ended(counts, seconds, message)\n--\n\n"
             "End the process with exit code 1 and a message, unless all runs end within some seconds.\n\n"
             "`counts` is a tuple of the addresses of numbers of runs. They must stay valid until the runs have ended.\n"
             "A thread does this that needs no Python, so it also works while Python exits.");

static PyObject *exit_unless_ended(PyObject *module, PyObject *arguments) {
  (void)module;
  double seconds;
  const char *message;
  PyObject *counts;
  if (!PyArg_ParseTuple(arguments, "O!ds", &PyTuple_Type, &counts, &seconds, &message))
    return NULL;
  if (!(seconds >= 0)) /* or not a number */
    return PyErr_Format(PyExc_ValueError, "a negative time");
  Exit *what = calloc(1, sizeof *what); /* the thread keeps it */
  if (what == NULL)
    return PyErr_NoMemory();
  what->seconds = seconds;
  what->streams = PyTuple_GET_SIZE(counts);
  what->counts = calloc((size_t)what->streams + 1, sizeof *what->counts);
  what->begun = calloc((size_t)what->streams + 1, sizeof *what->begun);
  what->message = strdup(message);
  if (what->counts == NULL || what->begun == NULL || what->message == NULL) {
    exit_free(what);
    return PyErr_NoMemory();
  }
  for (Py_ssize_t i = 0; i < what->streams; i++) {
    uint64_t address = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(counts, i));
    if (address == (uint64_t)-1 && PyErr_Occurred()) {
      exit_free(what);
      return NULL;
    }
    what->counts[i] = (Counts *)(uintptr_t)address;
  }
  for (Py_ssize_t i = 0; i < what->streams; i++)
    what->begun[i] = what->counts[i]->begun;
  sigset_t all, before;
  pthread_t thread;
  sigfillset(&all); /* the thread handles no signals */
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int code = pthread_create(&thread, NULL, end_process, what);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (code) {
    exit_free(what);
    return PyErr_Format(PyExc_OSError, "no thread can be started: %s", strerror(code));
  }
  pthread_detach(thread);
  Py_RETURN_NONE;
}

/* ---- running */

static CUresult issue_collective(Entry *entry, CUstream stream) {
  const void *source = (const void *)(uintptr_t)entry->collective.source;
  void *target = (void *)(uintptr_t)entry->collective.target, *communicator = entry->collective.communicator;
  size_t count = entry->collective.count;
  int type = entry->collective.type, code;
  switch (entry->collective.what) {
  case ALLGATHER:
    code = nccl.ncclAllGather(source, target, count, type, communicator, stream);
    break;
  case REDUCE_SCATTER:
    code = nccl.ncclReduceScatter(source, target, count, type, NCCL_SUM, communicator, stream);
    break;
  default:
    code = nccl.ncclAllReduce(source, target, count, type, NCCL_SUM, communicator, stream);
  }
  /* A collective may be in progress if the communicator does not block, and later work must come after it. An error of
   * an earlier collective shows only here, as torch's watchdog does not ask for it. */
  while (code == 0 || code == NCCL_IN_PROGRESS) {
    int failed = nccl.ncclCommGetAsyncError(communicator, &code);
    code = failed ? failed : code;
    if (code == 0)
      break;
  }
  return code ? (CUresult)(NCCL_ERRORS + code) : CUDA_SUCCESS;
}

static CUresult issue_memset(const Entry *entry, CUstream stream) {
  CUdeviceptr target = entry->set.target;
  unsigned value = entry->set.value;
  if (entry->set.unit == 1)
    return driver.cuMemsetD8Async(target, (unsigned char)value, entry->set.count, stream);
  if (entry->set.unit == 2)
    return driver.cuMemsetD16Async(target, (unsigned short)value, entry->set.count, stream);
  return driver.cuMemsetD32Async(target, value, entry->set.count, stream);
}

/* Let another stream write the number of the run when `stream` has reached this point. If `stream` wrote it, later work
   of the stream would begin 4 us later. */
static CUresult issue_count(Entry *entry, CUstream stream) {
  CUresult code = driver.cuEventRecord(entry->count.event, stream);
  if (code == CUDA_SUCCESS)
    code = driver.cuStreamWaitEvent(entry->count.aside, entry->count.event, 0);
  return code == CUDA_SUCCESS ? driver.cuStreamBatchMemOp_v2(entry->count.aside, 1, &entry->count.op, 0) : code;
}

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
  case MEMSET:
    return issue_memset(entry, stream);
  case RECORD:
    return driver.cuEventRecord(entry->event, stream);
  case WAIT:
    return driver.cuStreamWaitEvent(stream, entry->event, 0);
  case COLLECTIVE:
    return issue_collective(entry, stream);
  case COUNT:
    return issue_count(entry, stream);
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

/* Issue all entries in the tape's context. A thread may have another current context, or none yet. */
static CUresult issue_all(Tape *tape, Py_ssize_t *at) {
  CUcontext current = NULL;
  CUresult code = driver.cuCtxGetCurrent(&current);
  int other = current != tape->context;
  if (code == CUDA_SUCCESS && other)
    code = driver.cuCtxPushCurrent_v2(tape->context);
  if (code != CUDA_SUCCESS)
    return code;
  while (*at < tape->entries) {
    Entry *entry = &tape->entry[*at];
    if ((code = issue(entry, tape->stream[entry->stream])) != CUDA_SUCCESS)
      break;
    ++*at;
  }
  if (other)
    driver.cuCtxPopCurrent_v2(&current);
  return code;
}

/* Raise the exception for an error of the driver or of NCCL. */
static PyObject *failure(int place, CUresult code) {
  const char *text = NULL, *whose = (int)code < NCCL_ERRORS ? "CUDA" : "NCCL";
  int number = (int)code % NCCL_ERRORS;
  if ((int)code < NCCL_ERRORS)
    driver.cuGetErrorString(code, &text);
  else
    text = nccl.ncclGetErrorString(number);
  PyObject *message = PyUnicode_FromFormat("%s (%s error %d)", text ? text : "unknown error", whose, number);
  PyObject *arguments = Py_BuildValue("iN", place, message);
  if (arguments == NULL)
    return NULL;
  PyErr_SetObject(driver_error, arguments);
  Py_DECREF(arguments);
  return NULL;
}

/* Read the address of a tensor. A number is an address itself. Returns -1 and raises an exception for other objects. */
static int address_of(PyObject *tensor, uint64_t *address) {
  PyObject *number = PyLong_CheckExact(tensor) ? Py_NewRef(tensor) : PyObject_CallMethodNoArgs(tensor, data_ptr);
  if (number == NULL)
    return -1;
  *address = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  return *address == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static int read_addresses(Tape *tape, PyObject *registers, CUresult *code) {
  for (Py_ssize_t slot = 0; slot < tape->slots; slot++) {
    uint64_t address;
    if (tape->number[slot] >= PyList_GET_SIZE(registers)) {
      PyErr_SetString(PyExc_ValueError, "a slot of a register that is not there");
      return -1;
    }
    if (address_of(PyList_GET_ITEM(registers, tape->number[slot]), &address))
      return -1;
    if (address != tape->address[slot] && (*code = patch(tape, slot, address)) != CUDA_SUCCESS)
      return 0;
  }
  return 0;
}

/* Number a run that begins now. The calls of a session take turns, so no other run gets the same number. */
static void count_run(Entry *entry) {
  Counts *counts = entry->count.counts;
  int64_t number = counts->begun + 1;
  counts->text[number % RING] = entry->count.text;
  counts->begun = number;
  entry->count.op.writeValue.value64 = (cuuint64_t)number;
}

PyDoc_STRVAR(run_doc, "run(registers)\n--\n\n"
                      "Issue all entries, with the addresses of the tensors in the registers of the slots.\n\n"
                      "Raises the exception of `open` for the first entry that fails.");

static PyObject *run(Tape *tape, PyObject *registers) {
  if (!PyList_CheckExact(registers))
    return PyErr_Format(PyExc_TypeError, "expected a list of registers");
  if (driver.library == NULL || tape->running)
    return PyErr_Format(PyExc_RuntimeError, driver.library ? "the tape is run by another thread" : "no driver is open");
  CUresult code = CUDA_SUCCESS;
  Py_ssize_t at = 0;
  if (read_addresses(tape, registers, &code))
    return NULL;
  if (code == CUDA_SUCCESS) {
    tape->running = 1;
    if (tape->count != NULL)
      count_run(tape->count);
    /* The driver waits while the queue of a stream is full, and other threads must notice why it does not empty. */
    Py_BEGIN_ALLOW_THREADS
    code = issue_all(tape, &at);
    Py_END_ALLOW_THREADS
    tape->running = 0;
    if (code != CUDA_SUCCESS && tape->count != NULL)
      tape->count->count.counts->begun--; /* this run never ends, and its caller knows it */
  }
  if (code == CUDA_SUCCESS)
    Py_RETURN_NONE;
  return failure(tape->entries ? tape->entry[at].place : 0, code);
}

PyDoc_STRVAR(key_doc, "key(stream, registers, numbers, begin, end, unit)\n--\n\n"
                      "Return a tuple of `stream`, and of a number for each register in the tuple `numbers`.\n\n"
                      "It is the alignment of the tensor's address within `unit` bytes, or the address itself if it is\n"
                      "at least `begin` and below `end`. It is 0 for None.");

static PyObject *key(PyObject *module, PyObject *arguments) {
  (void)module;
  PyObject *stream, *registers, *numbers;
  unsigned long long begin, end, unit;
  if (!PyArg_ParseTuple(arguments, "OO!O!KKK", &stream, &PyList_Type, &registers, &PyTuple_Type, &numbers, &begin, &end,
                        &unit))
    return NULL;
  if (unit == 0)
    return PyErr_Format(PyExc_ValueError, "a unit of 0 bytes");
  PyObject *result = PyTuple_New(PyTuple_GET_SIZE(numbers) + 1);
  if (result == NULL)
    return NULL;
  PyTuple_SET_ITEM(result, 0, Py_NewRef(stream));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); i++) {
    PyObject *tensor = PyList_GetItem(registers, PyLong_AsSsize_t(PyTuple_GET_ITEM(numbers, i)));
    uint64_t address = 0;
    if (tensor == NULL || (tensor != Py_None && address_of(tensor, &address)))
      goto failed;
    PyObject *number = PyLong_FromUnsignedLongLong(address >= begin && address < end ? address : address % unit);
    if (number == NULL)
      goto failed;
    PyTuple_SET_ITEM(result, i + 1, number);
  }
  return result;
failed:
  Py_DECREF(result);
  return NULL;
}

/* ---- the calls of a product: a capture shows what cuBLAS issues, and executes nothing */

/* Overwrite the part of the stack that later calls use. The parameters of a kernel may contain bytes that nobody has
 * written. After this, most of them are zero in both captures of a product, so that the captures can be compared. */
static __attribute__((noinline)) void clear_stack(void) {
  char stack[STACK];
  memset(stack, 0, sizeof stack);
  __asm__ volatile("" : : "r"(stack) : "memory"); /* without this, the compiler leaves the memset out */
}

/* Return the buffer that contains all parameters of a kernel, and its size, or NULL if there is no buffer. A launch
 * passes either pointers to the parameters, or such a buffer. */
static const char *buffer_of(void **extra, size_t *size) {
  const char *buffer = NULL;
  *size = 0;
  for (; extra != NULL && extra[0] != CU_LAUNCH_PARAM_END; extra += 2)
    if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER)
      buffer = extra[1];
    else if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE)
      *size = *(size_t *)extra[1];
    else
      return NULL;
  return buffer;
}

/* Read the parameters of a kernel, each at its offset. Returns a tuple of their bytes and of their offsets. */
static PyObject *read_parameters(const CUDA_KERNEL_NODE_PARAMS *node) {
  size_t at = 0, length = 0, size = 0, count = 0, given;
  const char *buffer = buffer_of(node->extra, &given);
  CUresult code;
  while ((code = driver.cuFuncGetParamInfo(node->func, count, &at, &length)) == CUDA_SUCCESS) {
    size = at + length > size ? at + length : size;
    count++;
  }
  if (code != CUDA_ERROR_INVALID_VALUE || count == 0) /* the code for an index past the last parameter */
    return PyErr_Format(PyExc_ValueError, "the sizes of its parameters are not known (CUDA error %d)", (int)code);
  if (node->kernelParams == NULL && (buffer == NULL || given < size))
    return PyErr_Format(PyExc_ValueError, "its parameters cannot be read");
  PyObject *image = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size), *offsets = PyTuple_New((Py_ssize_t)count);
  if (image == NULL || offsets == NULL)
    goto failed;
  memset(PyBytes_AS_STRING(image), 0, size);
  for (size_t i = 0; i < count; i++) {
    driver.cuFuncGetParamInfo(node->func, i, &at, &length);
    memcpy(PyBytes_AS_STRING(image) + at, node->kernelParams == NULL ? buffer + at : node->kernelParams[i], length);
    PyObject *offset = PyLong_FromSize_t(at);
    if (offset == NULL)
      goto failed;
    PyTuple_SET_ITEM(offsets, (Py_ssize_t)i, offset);
  }
  return Py_BuildValue("NN", image, offsets);
failed:
  Py_XDECREF(image);
  Py_XDECREF(offsets);
  return NULL;
}

/* Read the attributes of a kernel's node that a launch needs. Returns their number, or -1 if they cannot be read. */
static Py_ssize_t read_attributes(CUgraphNode node, int dependent, CUlaunchAttribute *attributes) {
  static const CUlaunchAttributeID known[] = {
      CU_LAUNCH_ATTRIBUTE_COOPERATIVE, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
      CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE, CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION};
  static const CUlaunchAttributeValue usual;
  Py_ssize_t count = 0;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    CUlaunchAttribute *each = &attributes[count];
    memset(each, 0, sizeof *each);
    each->id = known[i];
    CUresult code = driver.cuGraphKernelNodeGetAttribute(node, known[i], &each->value);
    if (code == CUDA_SUCCESS)
      count += memcmp(&each->value, &usual, sizeof usual) != 0;
    else if (known[i] != CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION) /* not all GPUs and drivers have it */
      return -1;
  }
  if (dependent) {
    memset(&attributes[count], 0, sizeof *attributes);
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[count++].value.programmaticStreamSerializationAllowed = 1;
  }
  return count;
}

/* Return a kernel as (LAUNCH, its name, fields). `dependent` is 1 if it may begin before the node before it ends. */
static PyObject *kernel_of(CUgraphNode node, int dependent) {
  CUlaunchAttribute attributes[MAX_ATTRIBUTES];
  CUDA_KERNEL_NODE_PARAMS kernel = {0};
  CUresult code;
  const char *name = NULL;
  if ((code = driver.cuGraphKernelNodeGetParams_v2(node, &kernel)) != CUDA_SUCCESS ||
      (kernel.func == NULL && (code = driver.cuKernelGetFunction(&kernel.func, kernel.kern)) != CUDA_SUCCESS) ||
      (code = driver.cuFuncGetName(&name, kernel.func)) != CUDA_SUCCESS)
    return failure(0, code);
  Py_ssize_t made = read_attributes(node, dependent, attributes);
  if (made < 0)
    return PyErr_Format(PyExc_ValueError, "its attributes cannot be read");
  PyObject *parameters = read_parameters(&kernel);
  if (parameters == NULL)
    return NULL;
  PyObject *fields = Py_BuildValue(
      "is(K(IIIIII)Iy#OO)", LAUNCH, name, (unsigned long long)(uintptr_t)kernel.func, kernel.gridDimX, kernel.gridDimY,
      kernel.gridDimZ, kernel.blockDimX, kernel.blockDimY, kernel.blockDimZ, kernel.sharedMemBytes, (char *)attributes,
      made * (Py_ssize_t)sizeof(CUlaunchAttribute), PyTuple_GET_ITEM(parameters, 0), PyTuple_GET_ITEM(parameters, 1));
  Py_DECREF(parameters);
  return fields;
}

/* Return a memset as (MEMSET, "memset", fields). */
static PyObject *memset_of(CUgraphNode node) {
  CUDA_MEMSET_NODE_PARAMS set;
  CUresult code = driver.cuGraphMemsetNodeGetParams(node, &set);
  if (code != CUDA_SUCCESS)
    return failure(0, code);
  if (set.height != 1)
    return PyErr_Format(PyExc_ValueError, "a memset of several rows");
  return Py_BuildValue("is(KIIn)", MEMSET, "memset", (unsigned long long)set.dst, set.value, set.elementSize,
                       (Py_ssize_t)set.width);
}

/* Sort the nodes of a graph so that each node depends on the one before it. `dependent` gets 1 for each kernel that may
 * begin before the node before it ends. Returns -1 with an exception if the graph is no chain. */
static int sort(CUgraphNode *nodes, int *dependent, size_t count) {
  CUgraphNode before[MAX_NODES], sorted[MAX_NODES], last = NULL;
  CUgraphEdgeData edges[MAX_NODES];
  for (size_t i = 0; i < count; i++) {
    CUgraphNode found[2] = {NULL, NULL};
    CUgraphEdgeData data[2] = {{0}, {0}};
    size_t many = 2;
    CUresult code = driver.cuGraphNodeGetDependencies_v2(nodes[i], found, data, &many);
    if (code != CUDA_SUCCESS) {
      failure(0, code);
      return -1;
    }
    before[i] = many > 1 ? nodes[i] : found[0]; /* more than one: no node may come before it */
    edges[i] = data[0];
  }
  for (size_t n = 0; n < count; n++) {
    size_t i = 0;
    while (i < count && before[i] != last)
      i++;
    if (i == count) {
      PyErr_SetString(PyExc_ValueError, "its graph is no chain of nodes");
      return -1;
    }
    dependent[n] = n > 0 && edges[i].type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    last = sorted[n] = nodes[i];
  }
  memcpy(nodes, sorted, count * sizeof *nodes);
  return 0;
}

/* Return the nodes of a graph as a tuple, in the order in which they run. */
static PyObject *nodes_of(CUgraph graph) {
  CUgraphNode nodes[MAX_NODES];
  CUgraphNodeType type;
  CUresult code;
  int dependent[MAX_NODES];
  size_t count = 0;
  if ((code = driver.cuGraphGetNodes(graph, NULL, &count)) != CUDA_SUCCESS)
    return failure(0, code);
  if (count == 0 || count > MAX_NODES)
    return PyErr_Format(PyExc_ValueError, "its graph has %zu nodes", count);
  if ((code = driver.cuGraphGetNodes(graph, nodes, &count)) != CUDA_SUCCESS)
    return failure(0, code);
  if (sort(nodes, dependent, count))
    return NULL;
  PyObject *result = PyTuple_New((Py_ssize_t)count);
  for (size_t i = 0; result != NULL && i < count; i++) {
    PyObject *each = NULL;
    if ((code = driver.cuGraphNodeGetType(nodes[i], &type)) != CUDA_SUCCESS)
      failure(0, code);
    else if (type == CU_GRAPH_NODE_TYPE_KERNEL)
      each = kernel_of(nodes[i], dependent[i]);
    else if (type == CU_GRAPH_NODE_TYPE_MEMSET)
      each = memset_of(nodes[i]);
    else
      PyErr_SetString(PyExc_ValueError, "its graph has other nodes than kernels and memsets");
    if (each == NULL)
      Py_CLEAR(result);
    else
      PyTuple_SET_ITEM(result, (Py_ssize_t)i, each);
  }
  return result;
}

PyDoc_STRVAR(calls_of_doc, "calls_of(stream, work)\n--\n\n"
                           "Return the calls of the driver that `work()` makes: a tuple of (kind, name, fields).\n\n"
                           "The kind is LAUNCH or MEMSET. The fields are those of a tape entry. `stream` is the handle\n"
                           "of the stream to which `work` issues them. They are captured, so they execute nothing.\n"
                           "Raises ValueError if a tape cannot make these calls.");

static PyObject *calls_of(PyObject *module, PyObject *arguments) {
  (void)module;
  unsigned long long handle;
  PyObject *work;
  if (!PyArg_ParseTuple(arguments, "KO", &handle, &work))
    return NULL;
  if (driver.library == NULL)
    return PyErr_Format(PyExc_RuntimeError, "no driver is open");
  if (driver.cuFuncGetName == NULL || driver.cuFuncGetParamInfo == NULL || driver.cuGraphNodeGetDependencies_v2 == NULL)
    return PyErr_Format(PyExc_ValueError, "the CUDA driver is older than 12.4");
  CUstream stream = (CUstream)(uintptr_t)handle;
  CUgraph graph = NULL;
  /* relaxed: torch may allocate memory or query events meanwhile, in this thread or another one */
  CUresult code = driver.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
  if (code != CUDA_SUCCESS)
    return failure(0, code);
  clear_stack();
  PyObject *done = PyObject_CallNoArgs(work), *calls = NULL;
  code = driver.cuStreamEndCapture(stream, &graph);
  if (done != NULL)
    calls = code == CUDA_SUCCESS ? nodes_of(graph) : failure(0, code);
  if (graph != NULL)
    driver.cuGraphDestroy(graph);
  Py_XDECREF(done);
  return calls;
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

/* A launch: (function, six sizes of grid and block, shared bytes, attributes, image, offsets).
 *
 * `attributes` are the bytes of an array of CUlaunchAttribute. `image` contains the parameters, at `offsets`. */
static int make_launch(Entry *entry, PyObject *fields) {
  unsigned long long function;
  const char *attributes, *image;
  Py_ssize_t size, count, bytes;
  PyObject *offsets;
  CUlaunchConfig *config = &entry->launch.config;
  *config = (CUlaunchConfig){.attrs = entry->launch.attributes};
  if (!PyArg_ParseTuple(fields, "K(IIIIII)Iy#y#O!", &function, &config->gridDimX, &config->gridDimY, &config->gridDimZ,
                        &config->blockDimX, &config->blockDimY, &config->blockDimZ, &config->sharedMemBytes, &attributes,
                        &bytes, &image, &size, &PyTuple_Type, &offsets))
    return -1;
  count = PyTuple_GET_SIZE(offsets);
  if (bytes % (Py_ssize_t)sizeof(CUlaunchAttribute) || bytes > (Py_ssize_t)sizeof entry->launch.attributes) {
    PyErr_SetString(PyExc_ValueError, "not an array of CUlaunchAttribute, or too long");
    return -1;
  }
  memcpy(entry->launch.attributes, attributes, (size_t)bytes);
  config->numAttrs = (unsigned)(bytes / (Py_ssize_t)sizeof(CUlaunchAttribute));
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

/* A memset: (target, value, bytes of a value, number of values). */
static int make_memset(Entry *entry, PyObject *fields) {
  unsigned long long target;
  Py_ssize_t count;
  if (!PyArg_ParseTuple(fields, "KIIn", &target, &entry->set.value, &entry->set.unit, &count))
    return -1;
  if (count < 0 || (entry->set.unit != 1 && entry->set.unit != 2 && entry->set.unit != 4)) {
    PyErr_SetString(PyExc_ValueError, "a memset of a negative size, or with values that are not of 1, 2 or 4 bytes");
    return -1;
  }
  entry->set.target = target;
  entry->set.count = (size_t)count;
  return 0;
}

static int make_event(Entry *entry, PyObject *fields) {
  unsigned long long event;
  if (!PyArg_ParseTuple(fields, "K", &event))
    return -1;
  entry->event = (CUevent)(uintptr_t)event;
  return 0;
}

/* A collective of NCCL: (target, source, count, communicator, what, type). `type` is a value of ncclDataType_t. */
static int make_collective(Entry *entry, PyObject *fields) {
  unsigned long long target, source, communicator;
  Py_ssize_t count;
  if (!PyArg_ParseTuple(fields, "KKnKii", &target, &source, &count, &communicator, &entry->collective.what,
                        &entry->collective.type))
    return -1;
  if (nccl.library == NULL || communicator == 0 || entry->collective.what < 0 ||
      entry->collective.what >= COLLECTIVES) {
    PyErr_SetString(PyExc_ValueError, "a collective of an unknown kind, without NCCL, or without a communicator");
    return -1;
  }
  entry->collective.target = target;
  entry->collective.source = source;
  entry->collective.count = (size_t)count;
  entry->collective.communicator = (void *)(uintptr_t)communicator;
  return 0;
}

/* A count of runs: (address of Counts, text, stream aside, event). The address is the same for host and device. */
static int make_count(Tape *tape, Entry *entry, PyObject *fields) {
  unsigned long long counts, aside, event;
  long long text;
  if (!PyArg_ParseTuple(fields, "KLKK", &counts, &text, &aside, &event))
    return -1;
  if (tape->count != NULL || counts == 0) {
    PyErr_SetString(PyExc_ValueError, "a second count of runs, or one without memory");
    return -1;
  }
  tape->count = entry;
  entry->count.counts = (Counts *)(uintptr_t)counts;
  entry->count.text = text;
  entry->count.aside = (CUstream)(uintptr_t)aside;
  entry->count.event = (CUevent)(uintptr_t)event;
  entry->count.op = (CUstreamBatchMemOpParams){0};
  entry->count.op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
  entry->count.op.writeValue.address = (CUdeviceptr)counts + offsetof(Counts, ended);
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
  case MEMSET:
    return make_memset(entry, fields);
  case COLLECTIVE:
    return make_collective(entry, fields);
  case COUNT:
    return make_count(tape, entry, fields);
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
  case COLLECTIVE:
    *size = 2 * sizeof(CUdeviceptr);
    return (char *)&entry->collective.target;
  case MEMSET:
    *size = sizeof(CUdeviceptr);
    return (char *)&entry->set.target;
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
  free(tape->number);
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

static int make_slots_and_streams(Tape *tape, PyObject *slots, PyObject *streams) {
  for (Py_ssize_t i = 0; i < tape->slots; i++) {
    tape->address[i] = UINT64_MAX; /* no address yet */
    tape->number[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(slots, i));
    if (tape->number[i] < 0) {
      if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a slot of a register that is not there");
      return -1;
    }
  }
  for (Py_ssize_t i = 0; i < tape->streams; i++) {
    uint64_t handle = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(streams, i));
    if (handle == (uint64_t)-1 && PyErr_Occurred())
      return -1;
    tape->stream[i] = (CUstream)(uintptr_t)handle;
  }
  return 0;
}

static PyObject *tape_new(PyTypeObject *type, PyObject *arguments, PyObject *options) {
  static char *names[] = {"entries", "patches", "slots", "streams", NULL};
  PyObject *entries, *patches, *slots, *streams;
  if (!PyArg_ParseTupleAndKeywords(arguments, options, "O!O!O!O!", names, &PyTuple_Type, &entries, &PyTuple_Type,
                                   &patches, &PyTuple_Type, &slots, &PyTuple_Type, &streams))
    return NULL;
  if (driver.library == NULL)
    return PyErr_Format(PyExc_RuntimeError, "no driver is open");
  Tape *tape = (Tape *)type->tp_alloc(type, 0);
  if (tape == NULL)
    return NULL;
  tape->entries = PyTuple_GET_SIZE(entries);
  tape->patches = PyTuple_GET_SIZE(patches);
  tape->slots = PyTuple_GET_SIZE(slots);
  tape->streams = PyTuple_GET_SIZE(streams);
  tape->entry = calloc((size_t)tape->entries + 1, sizeof(Entry));
  tape->patch = calloc((size_t)tape->patches + 1, sizeof(Patch));
  tape->first = calloc((size_t)tape->slots + 2, sizeof(Py_ssize_t));
  tape->number = calloc((size_t)tape->slots + 1, sizeof(Py_ssize_t));
  tape->address = calloc((size_t)tape->slots + 1, sizeof(uint64_t));
  tape->stream = calloc((size_t)tape->streams + 1, sizeof(CUstream));
  if (!tape->entry || !tape->patch || !tape->first || !tape->number || !tape->address || !tape->stream) {
    PyErr_NoMemory();
    goto failed;
  }
  if (make_slots_and_streams(tape, slots, streams))
    goto failed;
  CUresult code = driver.cuCtxGetCurrent(&tape->context);
  if (code != CUDA_SUCCESS) {
    failure(0, code);
    goto failed;
  }
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
    {"run", (PyCFunction)run, METH_O, run_doc},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject TapeType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "hostir_launcher.Tape",
    .tp_doc = PyDoc_STR("Tape(entries, patches, slots, streams)\n--\n\n"
                        "A list of driver calls.\n\n"
                        "`slots` are numbers of registers, `streams` are handles. Runs take place in the CUDA context\n"
                        "that is current now."),
    .tp_basicsize = sizeof(Tape),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = tape_new,
    .tp_dealloc = (destructor)tape_free,
    .tp_methods = tape_methods,
};

static PyMethodDef functions[] = {
    {"open", open_driver, METH_VARARGS, open_doc},
    {"open_nccl", open_nccl, METH_O, open_nccl_doc},
    {"key", key, METH_VARARGS, key_doc},
    {"calls_of", calls_of, METH_VARARGS, calls_of_doc},
    {"exit_unless_ended", exit_unless_ended, METH_VARARGS, exit_unless_ended_doc},
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
  data_ptr = PyUnicode_InternFromString("data_ptr");
  if (data_ptr == NULL || PyType_Ready(&TapeType) < 0)
    return NULL;
  PyObject *made = PyModule_Create(&module);
  if (made == NULL || PyModule_AddObjectRef(made, "Tape", (PyObject *)&TapeType) == 0)
    return made;
  Py_DECREF(made);
  return NULL;
}
