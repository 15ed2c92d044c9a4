/* How a plain request of a known graph is handed in without Python's bytecode: it is copied to memory of its own, gets
 * its places in the queues, and its row in the table of submissions, as engine/door.py does it step by step.
 *
 * Door(...)(name, request, may_wait) returns the request's future, or None: then Python does it, or says what is wrong.
 * Its hand_in(...) does the same for one that Python has unfolded: its request is a list of what the graph was given.
 * Its tell(...) ends the futures of those that were answered, unless somebody waits for them by a callback.
 *
 * Under the gate nothing is called that may run Python's bytecode (as collecting garbage may): whatever is allocated is
 * so before. The interpreter lock is held all the time, so no other thread sees a request half handed in.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

#define ALIGNMENT 16

/* A row of ``submissions`` (core/state/tables.py). */
typedef struct {
    int64_t template_at, lengths_at, sessions_at, answers_at, results_at, word_at, sequence, arrival_ns, deadline_ns,
        schedule_by_ns;
    double order;
    int32_t num_lengths, num_answers, count, num_admitted, num_answered, priority, client, is_there;
    int64_t plan, id, session;
} Submission;

/* A row of ``queues``. */
typedef struct {
    int64_t taken, rows_taken, come, rows_come, ended, rows_ended, most, most_rows;
} Queue;

/* An item of ``submitted``. */
typedef int32_t Number;

/* A row of ``answered``: a request whose results are in its client's memory. */
typedef struct {
    int32_t submission, number;
    int64_t started_ns, ended_ns, arrival_ns, plan, session;
} Answered;

/* What is counted of a request that its client was told of. */
typedef struct {
    int64_t arrival_ns, started_ns, ended_ns, num_rows;
} Counted;

/* A row of ``tensors``: one tensor of a submission. */
typedef struct {
    int64_t at, kind;
} Tensor;

enum { DTYPE, SHAPE, REQUIRES_GRAD, IS_CPU, IS_CONTIGUOUS, IS_NEG, DATA_PTR, KNOWN_GRAPHS, PREPARED, STOPPED, IS_CLOSING,
       HAS_WORKERS, IS_SHUT, ACQUIRE, RELEASE, POPLEFT, APPEND, ADDRESS, LINE, OWNER, PLACE, NUMBER, WORD_AT, STATE,
       TOGETHER, MADE_CONDITION, CALLBACKS, SLEEPERS, NUM_NODES, NUM_NAMES };
static const char *const NAMES[NUM_NAMES] = {
    "dtype", "shape", "requires_grad", "is_cpu", "is_contiguous", "is_neg", "data_ptr", "known_graphs", "prepared", "stopped",
    "is_closing", "has_workers", "is_shut", "acquire", "release", "popleft", "append", "address", "line", "_owner",
    "place", "number", "word_at", "_state", "_together", "_made_condition", "_callbacks", "_sleepers", "num_nodes"};
static PyObject *names[NUM_NAMES];

/* The slots of a group (engine/request_group.py) that are read or written here. */
enum { MANAGER, MODEL, SEQUENCE, ARRIVAL_NS, MEMORY, TENSORS, OUTCOME, ROW, COUNT, SESSIONS, DEADLINE_NS, SCHEDULE_BY_NS,
       NUM_TOLD, PLAN, INPUTS, STATES, NUM_SLOTS };
static const char *const SLOTS[NUM_SLOTS] = {
    "_manager", "model", "sequence", "arrival_ns", "memory", "tensors", "outcome", "row", "count", "sessions",
    "deadline_ns", "schedule_by_ns", "num_told", "plan", "_inputs", "states"};

/* ---- What requests of one graph have in common ---- */

typedef struct {
    PyObject *path;         /* tuple: the keys that lead to it in a request */
    PyObject *torch_dtype;  /* of a torch.Tensor */
    PyObject *numpy_dtype;  /* of an array; or None */
    PyObject *shape;        /* tuple */
    Py_ssize_t num_bytes, begin; /* of its copy in a request's memory */
    int64_t kind;
    int is_integers; /* whether a list of integers will do */
} Given;

typedef struct {
    PyObject_HEAD
    PyObject *group; /* a RequestGroup with all that they have in common */
    PyObject *tensor_type, *array_type;
    PyObject *places; /* the model's Places */
    Submission row;
    int64_t num_rows;
    Py_ssize_t word_begin;      /* in the memory for results, behind these */
    Py_ssize_t num_given_bytes; /* of all tensors */
    long long count; /* requests since the graph is known */
    int num_given;
    Given *given;
} Prepared;

static void prepared_dealloc(Prepared *self)
{
    PyObject_GC_UnTrack(self);
    for (int k = 0; k < self->num_given; k++) {
        Py_CLEAR(self->given[k].path);
        Py_CLEAR(self->given[k].torch_dtype);
        Py_CLEAR(self->given[k].numpy_dtype);
        Py_CLEAR(self->given[k].shape);
    }
    PyMem_Free(self->given);
    Py_CLEAR(self->group);
    Py_CLEAR(self->tensor_type);
    Py_CLEAR(self->array_type);
    Py_CLEAR(self->places);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int prepared_traverse(Prepared *self, visitproc visit, void *arg)
{
    Py_VISIT(self->group);
    Py_VISIT(self->places);
    for (int k = 0; k < self->num_given; k++)
        Py_VISIT(self->given[k].path);
    return 0;
}

static int prepared_clear(Prepared *self)
{
    Py_CLEAR(self->group);
    Py_CLEAR(self->places);
    return 0;
}

static int read_given(Given *given, PyObject *from, Py_ssize_t *begin)
{
    PyObject *path, *torch_dtype, *numpy_dtype, *shape;
    if (!PyArg_ParseTuple(from, "O!OOO!nLp", &PyTuple_Type, &path, &torch_dtype, &numpy_dtype, &PyTuple_Type, &shape,
                          &given->num_bytes, &given->kind, &given->is_integers))
        return -1;
    given->path = Py_NewRef(path);
    given->torch_dtype = Py_NewRef(torch_dtype);
    given->numpy_dtype = Py_NewRef(numpy_dtype);
    given->shape = Py_NewRef(shape);
    given->begin = *begin;
    *begin += (given->num_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return 0;
}

static PyObject *prepared_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keys[] = {"group", "tensor_type", "array_type", "places", "template_at", "lengths_at",
                           "answers_at", "num_lengths", "num_answers", "word_begin", "num_rows", "priority", "never",
                           "given", NULL};
    PyObject *group, *tensor_type, *array_type, *places, *given;
    Submission row = {0};
    Py_ssize_t word_begin;
    long long num_rows, never;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOLLLiinLiLO!", keys, &group, &tensor_type,
                                     &array_type, &places, &row.template_at, &row.lengths_at, &row.answers_at,
                                     &row.num_lengths, &row.num_answers, &word_begin,
                                     &num_rows, &row.priority, &never, &PyTuple_Type, &given))
        return NULL;
    Prepared *self = (Prepared *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    row.deadline_ns = row.schedule_by_ns = never;
    row.count = 1;
    self->row = row;
    self->num_rows = num_rows;
    self->word_begin = word_begin;
    self->group = Py_NewRef(group);
    self->tensor_type = Py_NewRef(tensor_type);
    self->array_type = Py_NewRef(array_type);
    self->places = Py_NewRef(places);
    self->given = PyMem_Calloc(PyTuple_GET_SIZE(given) + 1, sizeof(Given));
    if (self->given == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(given); k++) {
        self->num_given = (int)k + 1;
        if (read_given(&self->given[k], PyTuple_GET_ITEM(given, k), &self->num_given_bytes) < 0)
            goto failed;
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static PyMemberDef prepared_members[] = {
    {"count", T_LONGLONG, offsetof(Prepared, count), 0, "The number of requests since the graph is known."}, {NULL}};

static PyTypeObject PreparedType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cellrt.native._hand_in.Prepared",
    .tp_doc = "The facts that requests of one graph have in common.",
    .tp_basicsize = sizeof(Prepared),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = prepared_new,
    .tp_dealloc = (destructor)prepared_dealloc,
    .tp_traverse = (traverseproc)prepared_traverse,
    .tp_clear = (inquiry)prepared_clear,
    .tp_members = prepared_members,
};

/* ---- Copying a request's tensors: 1 if done, 0 if it is not as plain as that, -1 with an error ---- */

static int is_attribute(PyObject *object, int name, PyObject *wanted)
{
    PyObject *value = PyObject_GetAttr(object, names[name]);
    if (value == NULL)
        return -1;
    Py_DECREF(value);
    return value == wanted;
}

static int is_answer(PyObject *object, int name, PyObject *wanted)
{
    PyObject *value = PyObject_CallMethodNoArgs(object, names[name]);
    if (value == NULL)
        return -1;
    Py_DECREF(value);
    return value == wanted;
}

static int has_shape(PyObject *object, PyObject *wanted)
{
    PyObject *shape = PyObject_GetAttr(object, names[SHAPE]);
    int is_so = shape == NULL ? -1 : PyObject_RichCompareBool(shape, wanted, Py_EQ);
    Py_XDECREF(shape);
    return is_so;
}

static int copy_tensor(const Given *given, PyObject *tensor, char *to)
{
    int is_plain = is_attribute(tensor, DTYPE, given->torch_dtype);
    if (is_plain > 0)
        is_plain = is_attribute(tensor, REQUIRES_GRAD, Py_False);
    if (is_plain > 0)
        is_plain = is_attribute(tensor, IS_CPU, Py_True);
    if (is_plain > 0)
        is_plain = is_answer(tensor, IS_CONTIGUOUS, Py_True);
    if (is_plain > 0)
        is_plain = is_answer(tensor, IS_NEG, Py_False);
    if (is_plain > 0)
        is_plain = has_shape(tensor, given->shape); /* last: the others may let another thread resize it */
    if (is_plain <= 0)
        return is_plain;
    PyObject *address = PyObject_CallMethodNoArgs(tensor, names[DATA_PTR]);
    if (address == NULL)
        return -1;
    const void *from = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    if (from == NULL)
        return PyErr_Occurred() ? -1 : given->num_bytes == 0;
    memcpy(to, from, given->num_bytes);
    return 1;
}

static int copy_array(const Given *given, PyObject *array, char *to)
{
    int is_plain = is_attribute(array, DTYPE, given->numpy_dtype);
    if (is_plain > 0)
        is_plain = has_shape(array, given->shape);
    if (is_plain <= 0)
        return is_plain;
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_SIMPLE) < 0)
        return -1;
    is_plain = view.len == given->num_bytes;
    if (is_plain)
        memcpy(to, view.buf, view.len);
    PyBuffer_Release(&view);
    return is_plain;
}

static int copy_integers(const Given *given, PyObject *list, char *to)
{
    Py_ssize_t count = given->num_bytes / (Py_ssize_t)sizeof(int64_t);
    if (!given->is_integers || PyList_GET_SIZE(list) != count)
        return 0;
    int64_t *numbers = (int64_t *)to;
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *number = PyList_GET_ITEM(list, k);
        if (!PyLong_CheckExact(number))
            return 0;
        numbers[k] = PyLong_AsLongLong(number);
        if (numbers[k] == -1 && PyErr_Occurred())
            return -1;
    }
    return 1;
}

static int copy_in(const Prepared *prepared, PyObject *request, char *memory)
{
    for (int k = 0; k < prepared->num_given; k++) {
        const Given *given = &prepared->given[k];
        PyObject *part = Py_NewRef(request);
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(given->path); j++) {
            PyObject *inner = PyObject_GetItem(part, PyTuple_GET_ITEM(given->path, j));
            Py_DECREF(part);
            if (inner == NULL)
                return -1;
            part = inner;
        }
        int is_copied = 0;
        if ((PyObject *)Py_TYPE(part) == prepared->tensor_type)
            is_copied = copy_tensor(given, part, memory + given->begin);
        else if ((PyObject *)Py_TYPE(part) == prepared->array_type)
            is_copied = copy_array(given, part, memory + given->begin);
        else if (PyList_CheckExact(part))
            is_copied = copy_integers(given, part, memory + given->begin);
        Py_DECREF(part);
        if (is_copied <= 0)
            return is_copied;
    }
    return 1;
}

/* ---- The door ---- */

/* Give a lock back that is held, whatever error there is. */
static void release(PyObject *lock)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *released = PyObject_CallMethodNoArgs(lock, names[RELEASE]);
    Py_XDECREF(released);
    PyErr_Restore(type, error, traceback);
}

static Py_ssize_t offset_of(PyObject *type, const char *name)
{
    PyObject *member = PyObject_GetAttrString(type, name);
    if (member == NULL)
        return -1;
    Py_ssize_t offset = -1;
    if (Py_IS_TYPE(member, &PyMemberDescr_Type))
        offset = ((PyMemberDescrObject *)member)->d_member->offset;
    else
        PyErr_Format(PyExc_TypeError, "%s is no slot of %R", name, type);
    Py_DECREF(member);
    return offset;
}

/* The offsets of a type that has slots alone. */
static int find_slots(PyObject *type, Py_ssize_t *slots)
{
    PyTypeObject *its = (PyTypeObject *)type;
    if (its->tp_dictoffset != 0 || its->tp_weaklistoffset != 0 || its->tp_itemsize != 0) {
        PyErr_SetString(PyExc_TypeError, "a group has slots alone");
        return -1;
    }
    for (int k = 0; k < NUM_SLOTS; k++)
        if ((slots[k] = offset_of(type, SLOTS[k])) < 0)
            return -1;
    return 0;
}

typedef struct {
    PyObject_HEAD
    PyObject *models, *gate, *turns, *manager, *crew, *door, *room, *groups, *free, *wake, *places;
    int64_t *words;
    Number *submitted;
    Submission *rows;
    Tensor *tensors;
    long long max_submissions, max_tensors;
    int submitted_word, sequence_word;
    PyObject *group_type, *future_type, *settling, *pending, *finished, *nobody, *no_inputs, *no_tensors, *no_states;
    Py_ssize_t slots[NUM_SLOTS];
    PyObject *rests; /* bytes: the addresses of the words that say whether a worker sleeps; empty: ask Python */
    int64_t asleep;
} Door;

#define DOOR_OBJECTS(X) \
    X(models) X(gate) X(turns) X(manager) X(crew) X(door) X(room) X(groups) X(free) X(wake) X(places) X(rests) \
    X(group_type) X(future_type) X(settling) X(pending) X(finished) X(nobody) X(no_inputs) X(no_tensors) X(no_states)

static int door_traverse(Door *self, visitproc visit, void *arg)
{
#define VISIT(name) Py_VISIT(self->name);
    DOOR_OBJECTS(VISIT)
    return 0;
}

static int door_clear(Door *self)
{
#define CLEAR(name) Py_CLEAR(self->name);
    DOOR_OBJECTS(CLEAR)
    return 0;
}

static void door_dealloc(Door *self)
{
    PyObject_GC_UnTrack(self);
    door_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *door_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keys[] = {"models", "gate", "turns", "manager", "crew", "door", "room", "groups", "free", "wake", "places",
                           "rests", "group_type", "future_type", "settling", "pending", "finished", "nobody",
                           "no_inputs", "no_tensors", "no_states", "words_at", "submitted_at", "rows_at", "tensors_at",
                           "max_submissions", "max_tensors", "submitted", "sequence", "asleep", NULL};
    Door *self = (Door *)type->tp_alloc(type, 0);
    long long words_at, submitted_at, rows_at, tensors_at, asleep;
    if (self == NULL)
        return NULL;
    int is_read = PyArg_ParseTupleAndKeywords(
        args, kwargs, "O!OOOOOOO!OOOO!OOOOOOOOOLLLLLLiiL", keys, &PyDict_Type, &self->models, &self->gate, &self->turns,
        &self->manager, &self->crew, &self->door, &self->room, &PyList_Type, &self->groups, &self->free, &self->wake,
        &self->places, &PyBytes_Type, &self->rests, &self->group_type, &self->future_type, &self->settling,
        &self->pending, &self->finished, &self->nobody, &self->no_inputs, &self->no_tensors, &self->no_states, &words_at,
        &submitted_at, &rows_at, &tensors_at, &self->max_submissions, &self->max_tensors, &self->submitted_word,
        &self->sequence_word, &asleep);
#define KEEP(name) Py_XINCREF(self->name);
    DOOR_OBJECTS(KEEP)
    if (!is_read || find_slots(self->group_type, self->slots) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->words = (int64_t *)words_at;
    self->submitted = (Number *)submitted_at;
    self->rows = (Submission *)rows_at;
    self->tensors = (Tensor *)tensors_at;
    self->asleep = asleep;
    return (PyObject *)self;
}

/* Whether an attribute is a certain object. */
static int is_still(PyObject *object, int name, PyObject *wanted)
{
    int is_so = is_attribute(object, name, wanted);
    if (is_so < 0)
        PyErr_Clear();
    return is_so > 0;
}

static Queue *queue_of(PyObject *places)
{
    PyObject *address = PyObject_GetAttr(places, names[ADDRESS]);
    if (address == NULL)
        return NULL;
    Queue *queue = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    return queue;
}

static int has_place(const Queue *queue, int64_t num_rows)
{
    return queue->taken + queue->come - queue->ended + 1 <= queue->most &&
           queue->rows_taken + queue->rows_come - queue->rows_ended + num_rows <= queue->most_rows;
}

static void take_place(Queue *queue, int64_t num_rows)
{
    queue->taken += 1;
    queue->rows_taken += num_rows;
}

static PyObject **slot_of(PyObject *object, Py_ssize_t offset) { return (PyObject **)((char *)object + offset); }

static void set_slot(PyObject *object, Py_ssize_t offset, PyObject *value)
{
    PyObject *before = *slot_of(object, offset);
    *slot_of(object, offset) = value;
    Py_XDECREF(before);
}

/* A copy of a group, whose type has slots alone. */
static PyObject *copy_group(PyObject *group)
{
    PyTypeObject *type = Py_TYPE(group);
    PyObject *made = type->tp_alloc(type, 0);
    if (made == NULL)
        return NULL;
    for (Py_ssize_t at = sizeof(PyObject); at < type->tp_basicsize; at += sizeof(PyObject *))
        *slot_of(made, at) = Py_XNewRef(*slot_of(group, at));
    return made;
}

static PyObject *make_future(PyObject *future_type, PyObject *group, int64_t word_at)
{
    PyTypeObject *type = (PyTypeObject *)future_type;
    PyObject *future = type->tp_alloc(type, 0), *word = PyLong_FromLongLong(word_at), *zero = PyLong_FromLong(0);
    if (future == NULL || word == NULL || zero == NULL || PyObject_SetAttr(future, names[OWNER], group) < 0 ||
        PyObject_SetAttr(future, names[PLACE], zero) < 0 || PyObject_SetAttr(future, names[NUMBER], zero) < 0 ||
        PyObject_SetAttr(future, names[WORD_AT], word) < 0)
        Py_CLEAR(future);
    Py_XDECREF(word);
    Py_XDECREF(zero);
    return future;
}

/* Hand in what is ready, under the gate: 1, or 0 if Python must do it, or -1 with an error. */
static int hand_in(Door *self, Prepared *prepared, PyObject *model, PyObject *name, PyObject *group, PyObject *future)
{
    if (PyDict_GetItemWithError(self->models, name) != model || !is_still(self->turns, STOPPED, Py_None) ||
        !is_still(self->manager, IS_CLOSING, Py_False) || !is_still(self->crew, HAS_WORKERS, Py_True) ||
        !is_still(self->door, IS_SHUT, Py_False))
        return PyErr_Occurred() ? -1 : 0;
    Queue *all = queue_of(self->places), *own = queue_of(prepared->places);
    if (all == NULL || own == NULL)
        return -1;
    if (!has_place(all, prepared->num_rows) || !has_place(own, prepared->num_rows) || PyObject_Size(self->free) <= 0)
        return 0;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    Submission row = prepared->row;
    row.arrival_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    row.sequence = 1 + __atomic_fetch_add(self->words + self->sequence_word, 1, __ATOMIC_SEQ_CST);
    row.results_at = (int64_t)PyMemoryView_GET_BUFFER(*slot_of(group, self->slots[MEMORY]))->buf;
    row.word_at = row.results_at + prepared->word_begin;
    PyObject *sequence = PyLong_FromLongLong(row.sequence), *arrival = PyLong_FromLongLong(row.arrival_ns);
    PyObject *at = NULL;
    if (sequence == NULL || arrival == NULL || PyObject_SetAttr(future, names[NUMBER], sequence) < 0 ||
        (at = PyObject_CallMethodNoArgs(self->free, names[POPLEFT])) == NULL) {
        Py_XDECREF(sequence);
        Py_XDECREF(arrival);
        return -1;
    }
    int64_t number = PyLong_AsLongLong(at);
    set_slot(group, self->slots[OUTCOME], Py_NewRef(future)); /* not before: they refer to each other from now on */
    set_slot(group, self->slots[SEQUENCE], sequence);
    set_slot(group, self->slots[ARRIVAL_NS], arrival);
    set_slot(group, self->slots[ROW], at);
    self->rows[number] = row;
    const char *tensors = PyByteArray_AS_STRING(*slot_of(group, self->slots[TENSORS]));
    for (int k = 0; k < prepared->num_given; k++) {
        Tensor *tensor = &self->tensors[number * self->max_tensors + k];
        tensor->at = (int64_t)(tensors + prepared->given[k].begin);
        tensor->kind = prepared->given[k].kind;
    }
    PyList_SetItem(self->groups, (Py_ssize_t)number, Py_NewRef(group));
    take_place(all, prepared->num_rows);
    take_place(own, prepared->num_rows);
    int64_t end = self->words[self->submitted_word];
    self->submitted[end % self->max_submissions] = (Number)number;
    __atomic_store_n(self->words + self->submitted_word, end + 1, __ATOMIC_SEQ_CST);
    prepared->count += 1;
    return 1;
}

static int must_wake(const Door *self)
{
    Py_ssize_t count = PyBytes_GET_SIZE(self->rests) / (Py_ssize_t)sizeof(int64_t);
    for (Py_ssize_t k = 0; k < count; k++) {
        int64_t *word = ((int64_t **)PyBytes_AS_STRING(self->rests))[k];
        if (__atomic_load_n(word, __ATOMIC_SEQ_CST) == self->asleep)
            return 1;
    }
    return count == 0 || !is_still(self->crew, HAS_WORKERS, Py_True);
}

/* Find what is prepared for a request, by its key: a new reference, or NULL if nothing is. */
static Prepared *find_prepared(PyObject *model, PyObject *request)
{
    PyObject *known = PyObject_GetAttr(model, names[KNOWN_GRAPHS]);
    Prepared *prepared = NULL;
    if (known == NULL || !PyTuple_CheckExact(known)) {
        Py_XDECREF(known);
        return NULL;
    }
    PyObject *key = PyObject_CallOneArg(PyTuple_GET_ITEM(known, 0), request);
    PyObject *its = key == NULL ? NULL : PyDict_GetItemWithError(PyTuple_GET_ITEM(known, 1), key);
    if (its != NULL)
        prepared = (Prepared *)PyObject_GetAttr(its, names[PREPARED]);
    Py_XDECREF(key);
    Py_DECREF(known);
    if (prepared != NULL && !Py_IS_TYPE(prepared, &PreparedType))
        Py_CLEAR(prepared);
    return prepared;
}

/* Whether those who wait for a place come first; under the gate. */
static int is_in_line(Door *self)
{
    PyObject *line = PyObject_GetAttr(self->room, names[LINE]);
    int is_empty = line != NULL && PyList_CheckExact(line) && PyList_GET_SIZE(line) == 0;
    Py_XDECREF(line);
    return !is_empty;
}

/* Hand in a request; of a plan (or NULL: its group has one). */
static PyObject *hand_in_by(Door *self, Prepared *prepared, PyObject *plan, PyObject *model, PyObject *name,
                            PyObject *request, int may_wait)
{
    PyObject *tensors = PyByteArray_FromStringAndSize(NULL, prepared->num_given_bytes);
    if (tensors == NULL || copy_in(prepared, request, PyByteArray_AS_STRING(tensors)) <= 0) {
        Py_XDECREF(tensors);
        return NULL;
    }
    PyObject *bytes = PyByteArray_FromStringAndSize(NULL, prepared->word_begin + ALIGNMENT), *memory = NULL;
    PyObject *group = NULL, *future = NULL, *has_gate = NULL;
    int is_done = -1;
    if (bytes == NULL || (memory = PyMemoryView_FromObject(bytes)) == NULL ||
        (group = copy_group(prepared->group)) == NULL)
        goto over;
    int64_t *word = (int64_t *)(PyByteArray_AS_STRING(bytes) + prepared->word_begin);
    *word = 0;
    if ((future = make_future(self->future_type, group, (int64_t)word)) == NULL)
        goto over;
    PyObject *const own[] = {self->manager, model, NULL, NULL, memory, tensors};
    for (int k = 0; k <= TENSORS; k++)
        if (own[k] != NULL)
            set_slot(group, self->slots[k], Py_NewRef(own[k]));
    if (plan != NULL)
        set_slot(group, self->slots[PLAN], Py_NewRef(plan));
    if ((has_gate = PyObject_CallMethodOneArg(self->gate, names[ACQUIRE], Py_False)) == Py_True) {
        is_done = may_wait && is_in_line(self) ? 0 : hand_in(self, prepared, model, name, group, future);
        release(self->gate);
    }
over:
    Py_XDECREF(tensors);
    Py_XDECREF(bytes);
    Py_XDECREF(memory);
    Py_XDECREF(group);
    Py_XDECREF(has_gate);
    if (is_done <= 0)
        Py_CLEAR(future);
    return future;
}

/* What a call returns: a future, once a worker was woken for it, or None: Python does it, or says what is wrong. */
static PyObject *handed_in(Door *self, PyObject *future)
{
    if (future == NULL) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
            return NULL;
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    if (must_wake(self)) {
        PyObject *woken = PyObject_CallNoArgs(self->wake);
        if (woken == NULL)
            Py_CLEAR(future);
        Py_XDECREF(woken);
    }
    return future;
}

static int fits_door(const Door *self, const Prepared *prepared)
{
    return prepared->group != NULL && Py_IS_TYPE(prepared->group, (PyTypeObject *)self->group_type);
}

static PyObject *door_call(Door *self, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *name, *request, *future = NULL;
    int may_wait;
    if (!PyArg_ParseTuple(args, "OOp", &name, &request, &may_wait))
        return NULL;
    PyObject *model = PyUnicode_CheckExact(name) ? PyDict_GetItemWithError(self->models, name) : NULL;
    if (model != NULL) {
        Py_INCREF(model);
        Prepared *prepared = find_prepared(model, request);
        if (prepared != NULL && fits_door(self, prepared) && (prepared->count & (prepared->count + 1)) != 0)
            future = hand_in_by(self, prepared, NULL, model, name, request, may_wait);
        Py_XDECREF(prepared);
        Py_DECREF(model);
    }
    return handed_in(self, future);
}

/* hand_in(prepared, plan, model, name, request, may_wait): as a call does it, of a plan that was looked up. What is
 * prepared for a plan does not hold the plan, as the plan holds it. */
static PyObject *door_hand_in(Door *self, PyObject *args)
{
    PyObject *prepared, *plan, *model, *name, *request, *future = NULL;
    int may_wait;
    if (!PyArg_ParseTuple(args, "O!OOUOp", &PreparedType, &prepared, &plan, &model, &name, &request, &may_wait))
        return NULL;
    if (fits_door(self, (Prepared *)prepared))
        future = hand_in_by(self, (Prepared *)prepared, plan, model, name, request, may_wait);
    return handed_in(self, future);
}

/* ---- Telling clients what was answered ---- */

static int has_no_sleepers(PyObject *future)
{
    PyObject *sleepers = PyObject_GetAttr(future, names[SLEEPERS]);
    Py_ssize_t count = sleepers == NULL ? -1 : PySequence_Size(sleepers);
    Py_XDECREF(sleepers);
    if (count < 0)
        PyErr_Clear();
    return count == 0;
}

/* Whether the client of a request that was handed in alone waits for nothing but a future that nobody has ended. */
static int is_plain(Door *self, PyObject *group)
{
    PyObject **const at[] = {slot_of(group, self->slots[SESSIONS]), slot_of(group, self->slots[DEADLINE_NS]),
                             slot_of(group, self->slots[SCHEDULE_BY_NS])};
    for (int k = 0; k < 3; k++)
        if (*at[k] != Py_None)
            return 0;
    PyObject *future = *slot_of(group, self->slots[OUTCOME]);
    return *slot_of(group, self->slots[STATES]) == self->no_states &&
           future != NULL && Py_IS_TYPE(future, (PyTypeObject *)self->future_type) &&
           is_still(future, MADE_CONDITION, Py_None) && is_still(future, CALLBACKS, Py_None) && has_no_sleepers(future);
}

/* End a future with the results of a group, unless its client has looked first, or has cancelled it. */
static int finish(Door *self, PyObject *future, PyObject *group)
{
    if (!is_still(future, STATE, self->pending))
        return 0;
    PyObject *place = PyLong_FromLong(0);
    int is_done = place == NULL || PyObject_SetAttr(future, names[TOGETHER], group) < 0 ||
                          PyObject_SetAttr(future, names[PLACE], place) < 0 ||
                          PyObject_SetAttr(future, names[STATE], self->finished) < 0 ||
                          PyObject_SetAttr(future, names[OWNER], Py_None) < 0
                      ? -1
                      : 0;
    Py_XDECREF(place);
    return is_done;
}

/* Give a row back, and what is needed no more. */
static int leave(Door *self, PyObject *group)
{
    PyObject *row = Py_NewRef(*slot_of(group, self->slots[ROW])), *none = PyLong_FromLong(-1), *one = PyLong_FromLong(1);
    if (none == NULL || one == NULL || PyList_SetItem(self->groups, PyLong_AsSsize_t(row), Py_NewRef(Py_None)) < 0) {
        Py_DECREF(row);
        Py_XDECREF(none);
        Py_XDECREF(one);
        return -1;
    }
    set_slot(group, self->slots[ROW], none);
    set_slot(group, self->slots[NUM_TOLD], one);
    set_slot(group, self->slots[INPUTS], Py_NewRef(self->no_inputs));
    set_slot(group, self->slots[TENSORS], Py_NewRef(self->no_tensors));
    set_slot(group, self->slots[OUTCOME], Py_NewRef(self->nobody));
    PyObject *added = PyObject_CallMethodOneArg(self->free, names[APPEND], row);
    Py_DECREF(row);
    Py_XDECREF(added);
    return added == NULL ? -1 : 0;
}

/* Append bytes to those that a dict has for a key. */
static int append(PyObject *found, PyObject *key, const void *bytes, Py_ssize_t num_bytes)
{
    PyObject *its = PyDict_GetItemWithError(found, key);
    if (its == NULL) {
        if (PyErr_Occurred() || (its = PyByteArray_FromStringAndSize(NULL, 0)) == NULL)
            return -1;
        int is_kept = PyDict_SetItem(found, key, its);
        Py_DECREF(its);
        if (is_kept < 0)
            return -1;
    }
    Py_ssize_t size = PyByteArray_GET_SIZE(its);
    if (PyByteArray_Resize(its, size + num_bytes) < 0)
        return -1;
    memcpy(PyByteArray_AS_STRING(its) + size, bytes, num_bytes);
    return 0;
}

static int note(Door *self, PyObject *counts, PyObject *group, const Answered *row)
{
    PyObject *num_nodes = PyObject_GetAttr(*slot_of(group, self->slots[PLAN]), names[NUM_NODES]);
    if (num_nodes == NULL)
        return -1;
    Counted counted = {row->arrival_ns, row->started_ns, row->ended_ns, PyLong_AsLongLong(num_nodes)};
    Py_DECREF(num_nodes);
    return append(counts, *slot_of(group, self->slots[MODEL]), &counted, sizeof(counted));
}

/* Take out an answer: 1, or 0 if Python must, or -1 with an error. */
static int tell_one(Door *self, const Answered *row, PyObject *counts, PyObject *together)
{
    if (row->plan != 0 || row->submission < 0 || row->submission >= PyList_GET_SIZE(self->groups))
        return 0;
    PyObject *group = PyList_GET_ITEM(self->groups, row->submission);
    if (!Py_IS_TYPE(group, (PyTypeObject *)self->group_type))
        return 0;
    PyObject *count = *slot_of(group, self->slots[COUNT]);
    int is_alone = count != NULL && PyLong_AsLong(count) == 1;
    if (is_alone && !is_plain(self, group))
        return 0;
    Py_INCREF(group);
    int is_done = note(self, counts, group, row);
    if (is_done == 0 && !is_alone)
        is_done = append(together, group, &row->number, sizeof(row->number));
    else if (is_done == 0) {
        PyObject *future = Py_NewRef(*slot_of(group, self->slots[OUTCOME]));
        if ((is_done = finish(self, future, group)) == 0)
            is_done = leave(self, group);
        Py_DECREF(future);
    }
    Py_DECREF(group);
    return is_done < 0 ? -1 : 1;
}

/* tell(answered_at, size, first, end): take out answers, and end the futures of those that are plain. Return what is
 * counted by model, the numbers of those that were submitted with others by group, and where in the ring the rest is. */
static PyObject *door_tell(Door *self, PyObject *args)
{
    long long answered_at, size, first, end;
    if (!PyArg_ParseTuple(args, "LLLL", &answered_at, &size, &first, &end))
        return NULL;
    PyObject *counts = PyDict_New(), *together = PyDict_New(), *others = PyList_New(0), *is_held = NULL;
    if (counts != NULL && together != NULL && others != NULL)
        is_held = PyObject_CallMethodOneArg(self->settling, names[ACQUIRE], Py_False);
    for (long long at = first; is_held != NULL && at < end; at++) {
        const Answered *row = (Answered *)answered_at + at % size;
        int is_told = is_held == Py_True ? tell_one(self, row, counts, together) : 0;
        PyObject *place = is_told == 0 ? PyLong_FromLongLong(at % size) : NULL;
        if (is_told < 0 || (is_told == 0 && (place == NULL || PyList_Append(others, place) < 0)))
            end = -1;
        Py_XDECREF(place);
    }
    if (is_held == Py_True)
        release(self->settling);
    PyObject *found = is_held == NULL || end < 0 ? NULL : PyTuple_Pack(3, counts, together, others);
    Py_XDECREF(is_held);
    Py_XDECREF(counts);
    Py_XDECREF(together);
    Py_XDECREF(others);
    return found;
}

static PyMethodDef door_methods[] = {
    {"hand_in", (PyCFunction)door_hand_in, METH_VARARGS,
     "Hand in a plain request of a graph that was looked up; return its future, or None if Python must do it."},
    {"tell", (PyCFunction)door_tell, METH_VARARGS,
     "Take out answers, and end the futures of those that are plain; return what is counted of them, and the others."},
    {NULL}};

static PyTypeObject DoorType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cellrt.native._hand_in.Door",
    .tp_doc = "Hands in a plain request of a known graph: returns its future, or None if Python must do it.",
    .tp_basicsize = sizeof(Door),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = door_new,
    .tp_call = (ternaryfunc)door_call,
    .tp_methods = door_methods,
    .tp_dealloc = (destructor)door_dealloc,
    .tp_traverse = (traverseproc)door_traverse,
    .tp_clear = (inquiry)door_clear,
};

/* Where each field of the rows is, and how long the rows are, by their names; another layout was compiled for. */
static PyObject *layout(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
#define FIELD(type, name) {#type "." #name, offsetof(type, name)}
#define SIZE(type) {#type, sizeof(type)}
    static const struct {
        const char *name;
        size_t at;
    } parts[] = {
        FIELD(Submission, template_at),  FIELD(Submission, lengths_at),     FIELD(Submission, sessions_at),
        FIELD(Submission, answers_at),   FIELD(Submission, results_at),     FIELD(Submission, word_at),
        FIELD(Submission, sequence),     FIELD(Submission, arrival_ns),     FIELD(Submission, deadline_ns),
        FIELD(Submission, schedule_by_ns), FIELD(Submission, order),        FIELD(Submission, num_lengths),
        FIELD(Submission, num_answers),  FIELD(Submission, count),          FIELD(Submission, num_admitted),
        FIELD(Submission, num_answered), FIELD(Submission, priority),       FIELD(Submission, client),
        FIELD(Submission, is_there),     FIELD(Submission, plan),           FIELD(Submission, id),
        FIELD(Submission, session),      FIELD(Answered, session),
        FIELD(Queue, taken),             FIELD(Queue, rows_taken),          FIELD(Queue, come),
        FIELD(Queue, rows_come),         FIELD(Queue, ended),               FIELD(Queue, rows_ended),
        FIELD(Queue, most),              FIELD(Queue, most_rows),           SIZE(Submission),
        FIELD(Answered, submission),     FIELD(Answered, number),           FIELD(Answered, started_ns),
        FIELD(Answered, ended_ns),       FIELD(Answered, arrival_ns),       FIELD(Answered, plan),
        SIZE(Answered),                  SIZE(Queue),                       SIZE(Number),
        SIZE(Tensor),
    };
    PyObject *found = PyDict_New();
    for (size_t k = 0; found != NULL && k < sizeof(parts) / sizeof(parts[0]); k++) {
        PyObject *at = PyLong_FromSize_t(parts[k].at);
        if (at == NULL || PyDict_SetItemString(found, parts[k].name, at) < 0)
            Py_CLEAR(found);
        Py_XDECREF(at);
    }
    return found;
}

static PyMethodDef methods[] = {
    {"layout", layout, METH_NOARGS, "Return where each field of the rows is, and how long the rows are."}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_hand_in", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__hand_in(void)
{
    for (int k = 0; k < NUM_NAMES; k++)
        if ((names[k] = PyUnicode_InternFromString(NAMES[k])) == NULL)
            return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made == NULL || PyModule_AddType(made, &PreparedType) < 0 || PyModule_AddType(made, &DoorType) < 0 ||
        PyModule_AddObject(made, "SOURCE", PyLong_FromUnsignedLong(SOURCE)) < 0) /* its checksum: see setup.py */
        return NULL;
    return made;
}
