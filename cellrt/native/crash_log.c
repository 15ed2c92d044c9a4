/* The last events of the scheduler, written to standard error when the process crashes.
 *
 * watch(events_at, size, count_at) adds an event log (core/state/event_log.py) and returns its number for forget(number).
 * install() has them written at a signal that ends the process; what handled it before handles it afterwards.
 *
 * The handler calls nothing but what POSIX allows in one: write and sigaction.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define MOST_LOGS 64
#define MOST_EVENTS 40 /* of a log */
#define MOST_NAMES 16

/* A row of ``events`` (core/state/tables.py). */
typedef struct {
    int64_t now_ns, sequence, task;
    int32_t what, detail;
} Event;

typedef struct {
    const Event *events;
    int64_t size;
    const int64_t *count;
} Log;

static Log logs[MOST_LOGS];
static char names[MOST_NAMES][32]; /* of what an event may be */
static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
#define NUM_SIGNALS (int)(sizeof(SIGNALS) / sizeof(SIGNALS[0]))
static struct sigaction before[NUM_SIGNALS];
static int is_installed;

static char *put_text(char *to, const char *text)
{
    while (*text)
        *to++ = *text++;
    return to;
}

static char *put_number(char *to, int64_t number)
{
    char digits[24];
    int count = 0;
    uint64_t left = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;
    do
        digits[count++] = (char)('0' + left % 10);
    while ((left /= 10) != 0);
    if (number < 0)
        *to++ = '-';
    while (count > 0)
        *to++ = digits[--count];
    return to;
}

static void write_out(const char *from, const char *end)
{
    while (from < end) {
        ssize_t count = write(STDERR_FILENO, from, (size_t)(end - from));
        if (count <= 0)
            return;
        from += count;
    }
}

static void write_event(const Event *event)
{
    char line[160], *to = line;
    to = put_number(to, event->now_ns / 1000);
    to = put_text(to, " us: request ");
    to = put_number(to, event->sequence);
    *to++ = ' ';
    to = put_text(to, event->what >= 0 && event->what < MOST_NAMES ? names[event->what] : "?");
    if (event->task >= 0) {
        to = put_text(to, " task ");
        to = put_number(to, event->task);
    }
    to = put_text(to, " (");
    to = put_number(to, event->detail);
    to = put_text(to, ")\n");
    write_out(line, to);
}

static void write_logs(int signal_number)
{
    char line[128], *to = put_text(line, "cellrt: signal ");
    to = put_number(to, signal_number);
    to = put_text(to, " ends the process; the last events of its engines, the newest last:\n");
    write_out(line, to);
    for (int k = 0; k < MOST_LOGS; k++) {
        Log log = logs[k];
        if (log.events == NULL || log.size <= 0)
            continue;
        int64_t count = *log.count, most = log.size < MOST_EVENTS ? log.size : MOST_EVENTS;
        for (int64_t at = count > most ? count - most : 0; at < count; at++)
            write_event(&log.events[at % log.size]);
    }
}

static void handle(int signal_number)
{
    for (int k = 0; k < NUM_SIGNALS; k++)
        if (SIGNALS[k] == signal_number)
            sigaction(signal_number, &before[k], NULL); /* first: a crash in here is theirs, too */
    write_logs(signal_number);
    raise(signal_number); /* it comes when this returns */
}

static PyObject *install(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = handle;
    action.sa_flags = SA_ONSTACK;
    for (int k = 0; !is_installed && k < NUM_SIGNALS; k++)
        sigaction(SIGNALS[k], &action, &before[k]);
    is_installed = 1;
    Py_RETURN_NONE;
}

static PyObject *watch(PyObject *Py_UNUSED(module), PyObject *args)
{
    long long events_at, size, count_at;
    if (!PyArg_ParseTuple(args, "LLL", &events_at, &size, &count_at))
        return NULL;
    for (int k = 0; k < MOST_LOGS; k++)
        if (logs[k].events == NULL) {
            logs[k].size = size;
            logs[k].count = (const int64_t *)count_at;
            logs[k].events = (const Event *)events_at;
            return PyLong_FromLong(k);
        }
    return PyLong_FromLong(-1);
}

static PyObject *forget(PyObject *Py_UNUSED(module), PyObject *args)
{
    int number;
    if (!PyArg_ParseTuple(args, "i", &number))
        return NULL;
    if (number >= 0 && number < MOST_LOGS)
        logs[number].events = NULL;
    Py_RETURN_NONE;
}

static PyObject *name(PyObject *Py_UNUSED(module), PyObject *args)
{
    int what;
    const char *text;
    if (!PyArg_ParseTuple(args, "is", &what, &text))
        return NULL;
    if (what >= 0 && what < MOST_NAMES)
        strncpy(names[what], text, sizeof(names[what]) - 1);
    Py_RETURN_NONE;
}

static PyObject *layout(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return Py_BuildValue("(nnnnnn)", offsetof(Event, now_ns), offsetof(Event, sequence), offsetof(Event, task),
                         offsetof(Event, what), offsetof(Event, detail), sizeof(Event));
}

static PyMethodDef methods[] = {
    {"install", install, METH_NOARGS, "Have the logs written when a signal ends the process."},
    {"watch", watch, METH_VARARGS, "Add a log: where its events are, how many, and where their count is."},
    {"forget", forget, METH_VARARGS, "Take out a log by its number."},
    {"name", name, METH_VARARGS, "Say what an event is called."},
    {"layout", layout, METH_NOARGS, "Return the offsets of an event's fields, and its size."},
    {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_crash_log", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__crash_log(void) { return PyModule_Create(&module); }
